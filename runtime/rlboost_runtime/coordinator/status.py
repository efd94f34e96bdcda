"""What a run looks like now, for people, scripts and the status file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlboost_runtime.backup.note import backup_status
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.report import cost_report
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.links.agents import AgentLinks
from rlboost_runtime.coordinator.links.trainer import TrainerLink
from rlboost_runtime.core.base.messages import LossCause, Pool
from rlboost_runtime.core.lease_controller import LeaseState
from rlboost_runtime.core.state.instance_states import InstanceState
from rlboost_runtime.health.monitor import FleetFacts
from rlboost_runtime.job import Job
from rlboost_runtime.protocol.status import (
    CostSoFar,
    InstanceRow,
    MachineRow,
    OnDemandFigures,
    PreemptionCounts,
    Preparation,
    PullStatus,
    RecentEvent,
    ReplayDigest,
    ResponseCounts,
    SeedingStatus,
    ServingStatus,
    Status,
    StepProgress,
    TokenCounts,
    TrainerStatus,
)
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.folder import read_json

REWARD_HISTORY = 1000
"""Longest reward history in a status, in steps."""
LAST_EVENTS = 20
"""Most events of a status."""


@dataclass(slots=True)
class OnDemand:
    """The cost report's comparison with on-demand machines only; computed again after each step."""

    _num_steps: int = -1
    _figures: OnDemandFigures | None = None

    def figures(self, ledger: Ledger, run: str, num_steps: int, now_wall: float) -> OnDemandFigures | None:
        """Return what a million tokens have cost so far and would have cost; None before the first step."""
        if num_steps == 0:
            return None
        if num_steps != self._num_steps:
            report = cost_report(ledger, now_wall, run)
            found = report.counterfactual
            self._num_steps = num_steps
            self._figures = OnDemandFigures(
                report.usd_per_million_tokens,
                found.usd_per_million_tokens,
                found.saving_fraction,
                found.basis,
            )
        return self._figures


@dataclass(slots=True)
class StatusSources:
    """The parts of the coordinator that a status is read from."""

    job: Job
    run: str
    started_at: float
    state: CoreDriver
    agents: AgentLinks
    trainer: TrainerLink
    ledger: Ledger
    ancestors: tuple[str, ...] = ()
    """Of a fork: see `Status.ancestors`."""
    on_demand: OnDemand = field(default_factory=OnDemand)
    tokens_per_s: float = 0.0
    loop_lag_p99_ms: float = 0.0
    ended: str | None = None

    @property
    def steps_before(self) -> int:
        """Steps that a fork has from its ancestors."""
        return int(self.ancestors[0].rpartition("@")[2]) if self.ancestors else 0


def build_status(sources: StatusSources, now_wall: float) -> dict[str, Any]:
    """Return the `Status` of the run as plain JSON values."""
    state, agents, ledger = sources.state, sources.agents, sources.ledger
    core, totals = state.core, state.totals
    preparing = _preparing(sources)
    num_steps, tokens_trained, rewards = ledger.step_summary(REWARD_HISTORY)
    step = core.step
    status = Status(
        run=sources.run,
        state=sources.ended or _state_name(sources),
        phase=_phase(sources, preparing),
        preparing=preparing,
        ancestors=list(sources.ancestors),
        step=num_steps + sources.steps_before,
        steps=None if sources.job.only_serves else sources.job.algorithm.steps,
        step_responses=None if step is None else StepProgress(step.num_finished, len(step.responses)),
        serving=_serving(sources, now_wall) if sources.job.only_serves else None,
        policy_version=core.newest_version,
        reward_mean=rewards[-1] if rewards else None,
        reward_history=rewards,
        tokens=TokenCounts(
            generated=totals.tokens_finished + _unfinished_tokens(state),
            trained=tokens_trained,
            migrated=max(state.tokens_migrated, core.counters.tokens_migrated),
            lost_estimate=agents.stats.lost_estimate,
            redone=totals.tokens_redone,
            dropped_late=agents.ingest.tokens_dropped,
            duplicate=agents.ingest.tokens_duplicate,
        ),
        responses=_responses(state),
        rewards=sources.trainer.warnings.rewards.as_json(),
        preemptions=_preemptions(core.counters.preemptions),
        seeding=SeedingStatus(core.seeding.t_seed_s, core.useful_instances, str(core.lease)),
        machines=_machines(sources, now_wall),
        instances=_instances(sources),
        weights={
            "kept_in": str(in_memory.root_of(sources.state.run.weights) or "disk"),
            **agents.weights.as_json(),
            "egress": _egress(ledger),
        },
        cost=CostSoFar(
            spent_usd=ledger.total_micro_usd(now_wall) / 1e6,
            rate_usd_per_hour=ledger.rate_micro_usd_per_hour() / 1e6,
            budget_usd=sources.job.budget.max_usd,
            counterfactual=sources.on_demand.figures(ledger, sources.run, num_steps, now_wall),
        ),
        tokens_per_s=round(sources.tokens_per_s, 1),
        started_at=sources.started_at,
        at=now_wall,
        trainer=TrainerStatus(sources.trainer.connected),
        backup=backup_status(sources.state.run, now_wall),
        warnings=sources.trainer.health.active,
        evaluations=list(sources.trainer.health.evaluations.values()),
        curriculum=sources.trainer.health.curriculum,
        events=[RecentEvent(e.at, e.kind, e.text) for e in ledger.events(LAST_EVENTS)],
        replay=ReplayDigest(totals.num_events, totals.num_commands, totals.commands_digest),
        journal_problem=state.journal_problem,
        loop_lag_p99_ms=round(sources.loop_lag_p99_ms, 2),
    )
    found: dict[str, Any] = msgspec.to_builtins(status)
    return found


def _serving(sources: StatusSources, now_wall: float) -> ServingStatus:
    core, totals = sources.state.core, sources.state.totals
    waits = [core.now - r.lifecycle.since for r in core.open_requests.values() if r.holder is None]
    spent, tokens = sources.ledger.total_micro_usd(now_wall), totals.request_tokens
    return ServingStatus(
        open=len(core.open_requests),
        waiting=len(waits),
        longest_wait_s=round(max(waits, default=0.0), 1),
        finished=totals.requests_finished,
        tokens=tokens,
        wanted_instances=core.useful_instances,
        usd_per_million_tokens=round(spent / tokens, 6) if tokens else None,
    )


def fleet_facts(sources: StatusSources, now_wall: float) -> FleetFacts:
    """Return what the health warnings on the fleet and the bill are derived from."""
    core, ledger = sources.state.core, sources.ledger
    num_steps = ledger.step_summary(0).num_steps
    figures = sources.on_demand.figures(ledger, sources.run, num_steps, now_wall)
    backup = backup_status(sources.state.run, now_wall)
    return FleetFacts(
        now=sources.state.now(),
        steps=num_steps,
        connected=sum(i.is_alive and i.pool is Pool.SPOT for i in core.instances.values()),
        useful=core.useful_instances,
        is_rolling_out=core.step is not None,
        saving_fraction=None if figures is None else figures.saving_fraction,
        lost=_preemptions(core.counters.preemptions).total,
        tokens=sources.agents.ingest.tokens_accepted,
        backup_lag_s=None if backup is None else backup.lag_s,
        backup_problem="" if backup is None else backup.problem,
        is_progress_due=_is_progress_due(sources),
    )


def _is_progress_due(sources: StatusSources) -> bool:
    """Return True if tokens or steps should come."""
    core = sources.state.core
    if sources.job.only_serves:
        return bool(core.open_requests)
    return core.step is not None or (_wants_trainer(sources) and _preparing(sources) is None)


def _unfinished_tokens(state: CoreDriver) -> int:
    """Return the tokens of the open steps' responses that have not finished. After a power cut the core may
    not know a step yet, or not all of it."""
    finished = {
        number
        for book in state.core.open_steps
        for number, response in book.responses.items()
        if response.finish_reason is not None
    }
    return sum(
        state.store.length(response)
        for step in state.open_steps
        for response in step.all_responses()
        if response not in finished
    )


def _responses(state: CoreDriver) -> ResponseCounts:
    counters, totals = state.core.counters, state.totals
    return ResponseCounts(
        requested=totals.requested,
        in_flight=sum(i.num_assigned for i in state.core.instances.values() if i.is_alive),
        finished=totals.finished + len(counters.quarantined),
        migrated=totals.responses_migrated,
        rebalanced=totals.responses_rebalanced,
        quarantined=len(counters.quarantined),
        cancelled=counters.cancelled,
    )


def _preemptions(losses: Mapping[LossCause, int]) -> PreemptionCounts:
    return PreemptionCounts(
        noticed=losses.get(LossCause.NOTICED, 0),
        silent=losses.get(LossCause.SILENT, 0),
        reset=losses.get(LossCause.RESET, 0) + losses.get(LossCause.MACHINE_GONE, 0),
    )


def _state_name(sources: StatusSources) -> str:
    core = sources.state.core
    if sources.job.only_serves and core.newest_version is not None:
        return "serving"
    if core.step is None:
        return "provisioning"
    return "training" if core.lease is LeaseState.TRAINER else "rollout"


def _preparing(sources: StatusSources) -> Preparation | None:
    """Return what the trainer does before its first step, as it wrote it; None once it trains."""
    if sources.ended is not None:
        return None
    found = read_json(sources.state.run.preparing)
    if not isinstance(found, dict):
        return None
    return Preparation(**{name: found[name] for name in Preparation.__struct_fields__ if name in found})


def _phase(sources: StatusSources, preparing: Preparation | None) -> str:
    core = sources.state.core
    if sources.ended is not None:
        return sources.ended
    if preparing is not None:
        return preparing.doing
    if core.step is None:
        return _before_the_first_step(sources)
    books = core.open_steps
    done = f"{sum(b.num_finished for b in books)} of {sum(len(b.responses) for b in books)} responses"
    match core.lease:
        case LeaseState.TRAINER:
            return f"training, {done} finished"
        case LeaseState.ENGINES:
            return f"rollout on reserved and spot engines, {done} finished"
        case _:
            return f"handing the GPU over, {done} finished"


def _before_the_first_step(sources: StatusSources) -> str:
    if not _wants_trainer(sources):
        return "up, without a trainer"
    if sources.job.only_serves:
        return _served_in_words(sources)
    if not sources.trainer.connected:
        return "starting the trainer"
    newest = sources.state.core.newest_version
    return "publishing the first policy version" if newest is None else "asking for the first step"


def _served_in_words(sources: StatusSources) -> str:
    core = sources.state.core
    if core.newest_version is None:
        return "reading the model"
    ready = sum(i.is_present for i in core.instances.values())
    return f"serving on {ready} engines" if ready else "waiting for an engine"


def _wants_trainer(sources: StatusSources) -> bool:
    return bool((read_json(sources.state.run.wanted) or {}).get("train"))


def _egress(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {"source": r.source, "zone": r.zone, "bytes": r.num_bytes, "usd": r.micro_usd / 1e6}
        for r in ledger.egress_routes()
    ]


def _machines(sources: StatusSources, now_wall: float) -> list[MachineRow]:
    return [
        MachineRow(
            id=row.machine,
            pool=row.pool,
            provider=row.provider,
            zone=row.zone,
            accelerator=row.accelerator,
            price_usd_per_hour=row.price_micro_usd_per_hour / 1e6,
            billed_s=row.billed_ns / 1e9,
            cost_usd=row.cost_micro_usd / 1e6,
            state=str(row.state),
            joined=row.pool == Pool.RESERVED or _has_joined(sources, row.machine),
            boot_s=sources.agents.boot_times.phases(row.machine),
        )
        for row in sources.ledger.machines(now_wall)
    ]


def _has_joined(sources: StatusSources, machine: str) -> bool:
    known = sources.state.core.machines.get(machine)
    return known is not None and known.has_joined


def shown_state(state: str, lease: LeaseState, newest_version: int | None) -> str:
    """Return an instance's state for people: an engine sleeps because the trainer has its GPU, and waits
    while there is no version to load."""
    if newest_version is None and state == InstanceState.LOADING:
        return "waiting"
    trains = lease in (LeaseState.TRAINER, LeaseState.RECALLING)
    return "training" if trains and state == InstanceState.ASLEEP else str(state)


def _instances(sources: StatusSources) -> list[InstanceRow]:
    core, now = sources.state.core, sources.state.now()
    rows = []
    for name, instance in sorted(core.instances.items()):
        row = InstanceRow(
            id=name,
            machine=instance.machine,
            pool=str(Pool(instance.pool)),
            state=shown_state(instance.shown_state, core.lease, core.newest_version),
            policy_version=instance.version,
            in_flight=instance.num_assigned,
            uptime_s=round(now - instance.joined_at, 1),
            max_running=instance.max_running,
            kv_tokens=instance.kv_tokens,
            kv_booked_tokens=instance.kv_load,
        )
        if (stats := sources.agents.stats.get(name)) is not None:
            row.tokens_per_s = round(stats.tokens_per_s, 1)
            row.pulling = None if stats.pulling is None else PullStatus(*stats.pulling)
            row.pull_s, row.apply_s, row.load_s = stats.pull_s, stats.apply_s, stats.load_s
            row.pause_s, row.start_s = stats.pause_s, stats.start_s
            row.kv_block_tokens = stats.kv_block_tokens or None
            row.max_running_measured = stats.is_running_measured
            if (beat := stats.beat) is not None:
                row.running, row.queued = beat.running, beat.waiting
                row.engine_preemptions, row.kv_free_tokens = beat.preempted, beat.kv_free_tokens
        rows.append(row)
    return rows
