"""How fast this machine did such a job before: rates out of the ledgers of former runs, newest first.

A run counts where it had the same model, engine, engine options and trainer as the job: what decides how fast
tokens come and how long training them takes. Nothing here is estimated; a run whose steps do not carry all
figures (it was made by an older version, or its steps were cut by restarts) is passed over.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.ledger_file import StepRecord
from rlboost_runtime.billing.report import was_resumed
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.index import all_runs

MIN_STEPS = 2
"""Steps that a run must have measured: one alone may be all start-up."""
FIRST_STEPS_LEFT_OUT = 1
"""Steps at the start that are left out where there are enough: machines still boot in them."""
NEARLY_ALL = 0.7
"""Share of a step's tokens from which on the reserved engines are taken to have waited for its tail."""
RUNS_LOOKED_AT = 50
"""Former runs that are opened at most: each costs a few milliseconds before a launch."""

_NEEDED = frozenset(
    {
        *("reserved_tokens", "reserved_rollout_s", "train_busy_s", "spot_instances_mean", "rollout_s"),
        *("rollout_wait_s", "train_wait_s"),
    }
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over `num_steps` steps of one run. Times in seconds; 0 tokens/s: that pool generated nothing."""

    run: str
    ended_at: float
    """End of the last step, in seconds since the Unix epoch."""
    num_steps: int
    reserved_tokens_per_s: float
    """Of all reserved engines together, while they rolled out."""
    spot_tokens_per_s: float
    """Of one spot instance, over the whole rollout: waiting and tails included."""
    train_s_per_token: float
    overhead_s: float
    """Of a step: publishing, checkpoint, rewards and everything else that is neither rollout nor training."""
    step_s: float
    """From the end of one step to the end of the next."""
    spot_instances: float
    tokens_per_response: float
    weight_bytes: float = 0.0
    """Of one version as an instance pulled it; 0: not known."""
    length_spread: float | None = None
    """Ninth over first decile of the responses' lengths; None: not known."""
    startup_s: float | None = None
    """From the run's first launch to its first step; None: not known."""
    boot_s: float | None = None
    """Median from a spot machine's request to its first version served, without waiting for that; None: no
    machine has served."""
    turns: MeasuredTurns | None = None
    """Of its episodes; None where a rollout was one response."""


@dataclass(frozen=True, slots=True)
class MeasuredTurns:
    """Means over the episodes of a run."""

    mean: float
    """Turns of an episode."""
    told_tokens: float
    """What the environment added after a turn."""
    pause_s: float
    """What it took for that."""


def measured_rates(job: Job) -> tuple[Rates, Job] | None:
    """Return the rates of the newest former run like `job`, and that run's job; None where there is none."""
    for run in reversed(all_runs()[-RUNS_LOOKED_AT:]):
        with contextlib.suppress(RLBoostError):  # an older version's run, or one without books
            former = stored_job(run)
            if is_alike(job, former) and (rates := rates_of(run, former)) is not None:
                return rates, former
    return None


def is_alike(job: Job, former: Job) -> bool:
    """Return True if `former` generates and trains a token as fast as `job` does."""
    return all(
        (
            job.model == former.model,
            job.rollout.engine == former.rollout.engine,
            job.rollout.engine_args == former.rollout.engine_args,
            (job.trainer.infra, job.trainer.threads) == (former.trainer.infra, former.trainer.threads),
            job.trainer.local_engines == former.trainer.local_engines,
        )
    )


def makes_like_responses(job: Job, former: Job) -> bool:
    """Return True if responses of `job` may be expected to be as long as those of `former`."""
    limits = (job.algorithm.max_response_tokens, former.algorithm.max_response_tokens)
    return (job.data, job.reward) == (former.data, former.reward) and limits[0] == limits[1]


def rates_of(run: RunFolder, job: Job) -> Rates | None:
    """Return what the run's ledger has measured; None for fewer than `MIN_STEPS` complete steps. Raises
    `NotFound` or `RuntimeFault` where there is no ledger that can be read."""
    with contextlib.closing(Ledger(run.ledger, read_only=True)) as ledger:
        all_steps = ledger.steps()
        pauses_ns = ledger.spending().pauses_ns()
        boot_s = _boot_s(ledger)
        launches = [bill.launched_at for bill in ledger.machines(0.0) if bill.launched_at is not None]
    steps = list(_complete(all_steps, pauses_ns))
    if len(steps) >= MIN_STEPS + FIRST_STEPS_LEFT_OUT:
        steps = steps[FIRST_STEPS_LEFT_OUT:]
    if len(steps) < MIN_STEPS:
        return None
    startup_s = max(0.0, all_steps[0].started_ns / 1e9 - min(launches)) if launches else None
    return replace(_rates(run.name, steps, job), startup_s=startup_s, boot_s=boot_s)


def boots_here(job: Job) -> float | None:
    """Return the median boot of the newest run here on machines of the same kind; None where there is none.

    A boot depends little on the model: it counts also where the run is not like `job` otherwise.
    """
    for run in reversed(all_runs()[-RUNS_LOOKED_AT:]):
        with contextlib.suppress(RLBoostError):
            if _kinds(stored_job(run)) != _kinds(job):
                continue
            with contextlib.closing(Ledger(run.ledger, read_only=True)) as ledger:
                if (found := _boot_s(ledger)) is not None:
                    return found
    return None


def _kinds(job: Job) -> tuple[object, ...]:
    """Return what a boot depends on: engine and places, and what is there before the engine starts."""
    parts = ("infra", "via", "preload", "image")
    offers = {tuple(getattr(offer, part, None) for part in parts) for offer in job.rollout.spot.any_of}
    return job.rollout.engine, offers


def _boot_s(ledger: Ledger) -> float | None:
    found = []
    for kept in ledger.kept_boots().values():
        boot = json.loads(kept)
        if boot.get("ready_at") is not None:
            load_at = max(boot["joined_at"], boot.get("told_at") or 0.0)
            found.append(boot["joined_at"] - boot["requested_at"] + boot["ready_at"] - load_at)
    return median(found) if found else None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that carries every figure, and the seconds since the end of the one before it."""

    record: StepRecord
    period_s: float


def _complete(steps: Sequence[StepRecord], pauses_ns: Sequence[tuple[int, int]]) -> Iterator[_Step]:
    """Yield the steps during which the run did not end; those after a resumption count from their start."""
    before: StepRecord | None = None
    for step in steps:
        began_ns = step.started_ns
        if before is not None and before.step + 1 == step.step and not was_resumed(before, step, pauses_ns):
            began_ns = before.ended_ns
        before = step
        if any(began_ns < end and start < step.ended_ns for start, end in pauses_ns):
            continue
        if step.metrics.keys() >= _NEEDED and step.tokens > 0:
            yield _Step(step, (step.ended_ns - began_ns) / 1e9)


def _rates(run: str, steps: Sequence[_Step], job: Job) -> Rates:
    def total(name: str) -> float:
        return sum(step.record.metrics[name] for step in steps)

    tokens = sum(step.record.tokens for step in steps)
    busy_s, period_s = total("train_busy_s"), sum(step.period_s for step in steps)
    spot_s = sum(s.record.metrics["spot_instances_mean"] * s.record.metrics["rollout_s"] for s in steps)
    spot_tokens = max(0.0, tokens - total("reserved_tokens"))
    waited_s = total("rollout_wait_s") + total("train_wait_s")
    # where they generated everything they also waited for the last responses: no full batches
    full = [s for s in steps if s.record.metrics["reserved_tokens"] < NEARLY_ALL * s.record.tokens] or steps

    def reserved(name: str) -> float:
        return sum(step.record.metrics[name] for step in full)

    responses = job.algorithm.prompts_per_step * job.algorithm.group_size * len(steps)
    deciles = [
        (s.record.metrics.get("length_p10", 0.0), s.record.metrics.get("length_p90", 0.0)) for s in steps
    ]
    spread = [high / low for low, high in deciles if low > 0]
    return Rates(
        run=run,
        ended_at=steps[-1].record.ended_ns / 1e9,
        num_steps=len(steps),
        reserved_tokens_per_s=_per(reserved("reserved_tokens"), reserved("reserved_rollout_s")),
        spot_tokens_per_s=_per(spot_tokens, spot_s),
        train_s_per_token=busy_s / tokens,
        overhead_s=max(0.0, period_s - waited_s - busy_s) / len(steps),
        step_s=period_s / len(steps),
        spot_instances=_per(spot_s, total("rollout_s")),
        tokens_per_response=tokens / responses,
        weight_bytes=steps[-1].record.metrics.get("weight_bytes", 0.0),
        length_spread=fmean(spread) if spread else None,
        turns=_turns([step.record for step in steps]),
    )


def _turns(steps: Sequence[StepRecord]) -> MeasuredTurns | None:
    found = [step.metrics for step in steps if {"turns_mean", "environment_s"} <= step.metrics.keys()]
    mean = fmean(each["turns_mean"] for each in found) if found else 0.0
    if mean < 1.0:
        return None
    told = fmean(each["environment_tokens_mean"] for each in found) / max(1.0, mean - 1.0)
    return MeasuredTurns(mean, told, fmean(each["environment_s"] for each in found))


def _per(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
