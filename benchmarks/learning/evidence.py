"""What a finished run left behind, as one record: rewards, what was done to it, whether it audits clean.

Kills are counted where it matters: the run's event log is driven through a fresh core, and an instance's end
counts as *inside a rollout* if it held unfinished responses at that moment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rlboost_runtime.audit.run import audit
from rlboost_runtime.coordinator.storage.journal import read_events
from rlboost_runtime.core.base.messages import LossCause, Pool, RunEnding
from rlboost_runtime.core.core import Core
from rlboost_runtime.run.folder import RunFolder

UNANNOUNCED = (LossCause.RESET, LossCause.SILENT, LossCause.MACHINE_GONE)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One finished run; JSON values only. `seconds`: from launch to end, the warm-up included."""

    condition: str
    seed: int
    job_digest: str
    commit: str
    state: str
    rewards: list[float]
    """Mean reward of each step, by the plain scorer."""
    seconds: float
    losses: dict[str, int]
    """Ends of instances' lives by cause, until the run was wound up."""
    kills_in_rollout: int
    """Unannounced ends of instances that held unfinished responses."""
    notices_in_rollout: int
    """Announced reclaims that found unfinished responses."""
    responses_interrupted: int
    """Responses that those kills found unfinished, counted at each kill."""
    responses: dict[str, int]
    tokens: dict[str, int]
    mismatch_kl_max: float
    """Largest divergence of any step between the logprobs that the engines recorded and those of the
    trainer's policy, migrated tokens included: 0 but for rounding where every token is on-policy."""
    audit_problems: list[str]
    """Broken promises found in event log and token journal; empty where all hold."""


@dataclass(slots=True)
class Interruptions:
    """What happened to spot instances that held work; `losses` has the ends of all instances."""

    kills: int = 0
    notices: int = 0
    responses: int = 0
    losses: dict[str, int] = field(default_factory=dict)


def record(
    run: RunFolder,
    status: dict[str, Any],  # as printed by `rlboost status --json`
    *,
    condition: str,
    seed: int,
    digest: str,
    commit: str,
    seconds: float,
) -> RunRecord:
    """Return what is to be kept of a run that has ended."""
    found = interruptions(run)
    return RunRecord(
        condition=condition,
        seed=seed,
        job_digest=digest,
        commit=commit,
        state=status["state"],
        rewards=status["reward_history"],
        seconds=round(seconds, 1),
        losses=found.losses,
        kills_in_rollout=found.kills,
        notices_in_rollout=found.notices,
        responses_interrupted=found.responses,
        responses=status["responses"],
        tokens=status["tokens"],
        mismatch_kl_max=_mismatch_kl_max(run),
        audit_problems=audit(run).problems,
    )


def _mismatch_kl_max(run: RunFolder) -> float:
    """Return the largest mismatch of the steps that were trained with the weights that sampled them."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return max(float(line["mismatch_kl"]) for line in lines if "mismatch_kl" in line)


def interruptions(run: RunFolder) -> Interruptions:
    """Drive the event log, up to the winding up, through a fresh core and count what interrupted work."""
    core, found = Core(), Interruptions()
    noticed: set[tuple[str, int]] = set()
    for event in read_events(run.events):
        if isinstance(event, RunEnding):
            break
        before = {
            name: (instance.epoch, instance.num_assigned, instance.is_noticed)
            for name, instance in core.instances.items()
            if instance.pool is Pool.SPOT
        }
        losses = {cause: core.counters.losses[cause] for cause in UNANNOUNCED}
        core.handle(event)
        for name, (epoch, held, was_noticed) in before.items():
            now = core.instances.get(name)
            is_gone = now is None or now.epoch != epoch
            if held and is_gone and any(core.counters.losses[c] > losses[c] for c in UNANNOUNCED):
                found.kills += 1
                found.responses += held
            elif held and now is not None and now.is_noticed and not was_noticed:
                noticed.add((name, epoch))
    found.notices = len(noticed)
    found.losses = {str(cause): count for cause, count in sorted(core.counters.losses.items()) if count}
    return found
