"""What a run looks like now: one plain dictionary for people, scripts and the status file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.report import cost_report
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.links.agents import AgentLinks
from rlboost_runtime.coordinator.links.trainer import TrainerLink
from rlboost_runtime.core.base.messages import LossCause, Pool
from rlboost_runtime.core.window.gpu_lease import LeaseState
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import read_json

REWARD_HISTORY = 1000
"""Longest reward history in a status, in steps."""
LAST_EVENTS = 20
"""Events in words shown by a status."""


@dataclass(slots=True)
class OnDemand:
    """The cost report's comparison with on-demand machines only; computed anew after each step."""

    _num_steps: int = -1
    _figures: Any = None

    def figures(self, ledger: Ledger, run: str, num_steps: int, now_wall: float) -> Any:
        """Return `usd_per_million_tokens` (spent so far) and the report's `counterfactual`; None before the
        first step."""
        if num_steps == 0:
            return None
        if num_steps != self._num_steps:
            report = cost_report(ledger, now_wall, run)
            spent = {"spent_usd_per_million_tokens": report["usd_per_million_tokens"]}
            self._num_steps, self._figures = num_steps, {**spent, **_mapping(report["counterfactual"])}
        return self._figures


@dataclass(slots=True)
class StatusSources:
    """Where a status comes from."""

    job: Job
    run: str
    started_at: float
    state: CoreDriver
    agents: AgentLinks
    trainer: TrainerLink
    ledger: Ledger
    on_demand: OnDemand = field(default_factory=OnDemand)
    tokens_per_s: float = 0.0
    loop_lag_p99_ms: float = 0.0
    ended: str | None = None


def build_status(sources: StatusSources, now_wall: float) -> dict[str, Any]:
    """Return the status of design section 6, as plain JSON values."""
    state, agents = sources.state, sources.agents
    core, totals = state.core, state.totals
    preparing = _preparing(sources)
    num_steps, tokens_trained, rewards = sources.ledger.step_summary(REWARD_HISTORY)
    step = core.step
    in_flight = sum(i.num_assigned for i in core.instances.values() if i.is_alive)
    unfinished = sum(
        state.store.length(r)
        for r in (state.step.all_responses() if state.step is not None and step is not None else ())
        if core.response(r).finish_reason is None
    )
    losses = core.counters.preemptions
    return {
        "run": sources.run,
        "state": sources.ended or _state_name(sources),
        "phase": _phase(sources, preparing),
        "preparing": preparing,
        "step": num_steps,
        "steps": sources.job.algorithm.steps,
        "step_responses": None if step is None else {"finished": step.finished, "requested": step.requested},
        "policy_version": core.newest_version,
        "reward_mean": rewards[-1] if rewards else None,
        "reward_history": rewards,
        "tokens": {
            "generated": totals.tokens_finished + unfinished,
            "trained": tokens_trained,
            "migrated": max(state.tokens_migrated, core.counters.tokens_migrated),
            "lost_estimate": agents.stats.lost_estimate,
            "redone": totals.tokens_redone,
            "dropped_late": agents.ingest.tokens_dropped,
            "duplicate": agents.ingest.tokens_duplicate,
        },
        "responses": {
            "requested": totals.requested,
            "in_flight": in_flight,
            "finished": totals.finished + len(core.counters.quarantined),
            "migrated": totals.responses_migrated,
            "quarantined": len(core.counters.quarantined),
            "cancelled": core.counters.cancelled,
        },
        "rewards": sources.trainer.warnings.rewards.as_json(),
        "preemptions": {
            "noticed": losses.get(LossCause.NOTICED, 0),
            "silent": losses.get(LossCause.SILENT, 0),
            "reset": losses.get(LossCause.RESET, 0) + losses.get(LossCause.MACHINE_GONE, 0),
        },
        "seeding": {
            "t_seed_s": core.seeding.t_seed_s,
            "useful_instances": core.useful_instances,
            "lease": str(core.lease),
        },
        "machines": _machines(sources, now_wall),
        "instances": _instances(sources),
        "weights": {**agents.weights.as_json(), "egress": _egress(sources)},
        "cost": {
            "spent_usd": sources.ledger.total_micro_usd(now_wall) / 1e6,
            "rate_usd_per_hour": sources.ledger.rate_micro_usd_per_hour() / 1e6,
            "budget_usd": sources.job.budget.max_usd,
            "counterfactual": sources.on_demand.figures(sources.ledger, sources.run, num_steps, now_wall),
        },
        "tokens_per_s": round(sources.tokens_per_s, 1),
        "started_at": sources.started_at,
        "at": now_wall,
        "trainer": {"connected": sources.trainer.connected},
        "events": [{"at": e.at, "kind": e.kind, "text": e.text} for e in sources.ledger.events(LAST_EVENTS)],
        "replay": {
            "events": totals.num_events,
            "commands": totals.num_commands,
            "digest": totals.commands_digest,
        },
        "journal_problem": state.journal_problem,
        "loop_lag_p99_ms": round(sources.loop_lag_p99_ms, 2),
    }


def _mapping(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def _state_name(sources: StatusSources) -> str:
    core = sources.state.core
    if core.step is None:
        return "provisioning"
    return "training" if core.lease is LeaseState.TRAINER else "rollout"


def _preparing(sources: StatusSources) -> dict[str, Any] | None:
    """Return what the trainer does before its first step, as it says; None once it trains."""
    if sources.ended is not None:
        return None
    found = read_json(sources.state.run.preparing)
    return found if isinstance(found, dict) else None


def _phase(sources: StatusSources, preparing: dict[str, Any] | None) -> str:
    core = sources.state.core
    if sources.ended is not None:
        return sources.ended
    if preparing is not None:
        return str(preparing["doing"])
    if core.step is None:
        return _before_the_first_step(sources)
    done = f"{core.step.finished} of {core.step.requested} responses"
    match core.lease:
        case LeaseState.TRAINER:
            return f"training, {done} finished"
        case LeaseState.ENGINES:
            return f"rollout on reserved and spot engines, {done} finished"
        case _:
            return f"handing the GPU over, {done} finished"


def _before_the_first_step(sources: StatusSources) -> str:
    if not (read_json(sources.state.run.wanted) or {}).get("train"):
        return "up, without a trainer"
    if not sources.trainer.connected:
        return "starting the trainer"
    newest = sources.state.core.newest_version
    return "publishing the first policy version" if newest is None else "asking for the first step"


def _pulling(progress: tuple[int, int, int] | None) -> dict[str, int] | None:
    if progress is None:
        return None
    version, done, total = progress
    return {"version": version, "done_bytes": done, "total_bytes": total}


def _egress(sources: StatusSources) -> list[dict[str, Any]]:
    return [
        {"source": r.source, "zone": r.zone, "bytes": r.num_bytes, "usd": r.micro_usd / 1e6}
        for r in sources.ledger.egress_routes()
    ]


def _machines(sources: StatusSources, now_wall: float) -> list[dict[str, Any]]:
    return [
        {
            "id": row.machine,
            "pool": row.pool,
            "provider": row.provider,
            "zone": row.zone,
            "accelerator": row.accelerator,
            "price_usd_per_hour": row.price_micro_usd_per_hour / 1e6,
            "billed_s": row.billed_ns / 1e9,
            "cost_usd": row.cost_micro_usd / 1e6,
            "state": str(row.state),
            "joined": row.pool == Pool.RESERVED or _has_joined(sources, row.machine),
            "boot_s": sources.agents.boot_times.phases(row.machine),
        }
        for row in sources.ledger.machines(now_wall)
    ]


def _has_joined(sources: StatusSources, machine: str) -> bool:
    known = sources.state.core.machines.get(machine)
    return known is not None and known.has_joined


def _instances(sources: StatusSources) -> list[dict[str, Any]]:
    core, now = sources.state.core, sources.state.now()
    rows = []
    for name, instance in sorted(core.instances.items()):
        stats = sources.agents.stats.get(name)
        rows.append(
            {
                "id": name,
                "machine": instance.machine,
                "pool": str(Pool(instance.pool)),
                "state": str(instance.state),
                "policy_version": instance.version,
                "in_flight": instance.num_assigned,
                "tokens_per_s": 0.0 if stats is None else round(stats.tokens_per_s, 1),
                "uptime_s": round(now - instance.joined_at, 1),
                "pulling": None if stats is None else _pulling(stats.pulling),
                "pull_s": 0.0 if stats is None else stats.pull_s,
                "apply_s": 0.0 if stats is None else stats.apply_s,
                "load_s": 0.0 if stats is None else stats.load_s,
                "pause_s": 0.0 if stats is None else stats.pause_s,
                "start_s": {} if stats is None else stats.start_s,
            }
        )
    return rows
