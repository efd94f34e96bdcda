"""What a job will take and cost, from the simulator of `rlboost simulate`: hours, dollars, alternatives.

Each seed is one possible run: it meets another stretch of the market and other lengths. The first steps are
simulated and the others taken to be like the mean of those after the fleet has settled. The interval is that
in which 19 of 20 such runs would lie (Student's t), a run being as many independent stretches of the market
as it is longer than a simulated one. The work is bounded by the number of
simulated responses, so that the same job gives the same plan on any machine. Everything here is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean

from rlboost_cli.planning.alternatives import Alternative, alternatives
from rlboost_cli.planning.evaluations import PlannedEvaluations, planned_evaluations
from rlboost_cli.simulation.job import SimulatedJob, simulated_job
from rlboost_cli.simulation.market import market_of
from rlboost_cli.simulation.runs import BASELINE, OURS, Estimate, estimate
from rlboost_runtime.billing.counterfactual import Counterfactual, on_demand_only
from rlboost_runtime.billing.planned import PlannedParts
from rlboost_runtime.errors import ConfigError, RLBoostError
from rlboost_runtime.job import Job
from rlboost_runtime.money import parse_usd
from rlboost_runtime.sim import Preset, SimResult, simulate
from rlboost_runtime.traces import Trace

SEEDS = 4
FEWEST_STEPS, MOST_STEPS = 6, 200
"""Steps of one simulation."""
MOST_RESPONSES = 28_000
"""Responses of all simulations of the job as it is: about three seconds of a core."""
SETTLING_STEPS = 3
"""First steps that say nothing about the later ones: the fleet boots, and the window is learned."""
ALONE_STEPS = 4
"""Steps simulated without spot machines: there they differ by their lengths alone."""
_MOST_TURNS = 400
"""Turns of a simulation per response: beyond so many it does not come to an end."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Projection:
    """A whole run as simulated."""

    hours: Estimate
    """From launch to end."""
    usd: Estimate
    tokens: float
    usd_per_million_tokens: float
    preemptions: float
    parts: PlannedParts
    """Of the mean run."""
    on_demand: Counterfactual
    on_demand_hours: float | None
    """What the run would last on the reserved machine alone; None: it has no engines."""
    simulated_steps: int
    """Of each seed."""
    is_calibrated: bool
    """A run of such a job was measured here."""
    notes: tuple[str, ...]
    evaluations: EvaluationShare
    """In the figures above, without their tokens: those are what is trained on."""
    options: tuple[Option, ...] = ()
    """What else could be done, cheapest tokens first; the job as it is among them."""

    @property
    def speedup(self) -> float | None:
        """Hours without spot machines over hours with them."""
        return None if self.on_demand_hours is None else self.on_demand_hours / self.hours.mean


@dataclass(frozen=True, slots=True)
class EvaluationShare:
    """What of a run is for its evaluations."""

    times: int
    tokens: float
    hours: float
    usd: float


@dataclass(frozen=True, slots=True)
class Option:
    """Another way to run the job, simulated on one stretch of the market."""

    what: str
    hours: float
    usd: float
    usd_per_million_tokens: float
    is_job: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """One simulated run, continued to all steps of the job."""

    seconds: float
    usd: float
    tokens: float
    preemptions: float
    spot_hours: float
    evaluation_s: float
    evaluation_usd: float
    parts: PlannedParts


def project(
    job: Job, folder: Path, say: Say = lambda words: None, *, with_options: bool = False
) -> Projection:
    """Return what `job`, whose files are in `folder`, will take and cost.

    Raises `ConfigError` where its model or a GPU is unknown to the simulator, or its model does not fit.
    """
    if job.algorithm.loss == "sft":
        raise ConfigError(
            "loss sft rolls nothing out, which is what is simulated", "a few steps tell its pace"
        )
    say("simulating the job")
    found = simulated_job(job, folder)
    evaluations = planned_evaluations(job, folder, found.preset)
    found = replace(found, notes=found.notes + evaluations.notes)
    num_steps = _num_steps(job)
    runs = []
    for seed in range(SEEDS):
        say(f"simulating the job, run {seed + 1} of {SEEDS}")
        market = market_of(job, folder, seed)
        runs.append(_run(job, found, market, OURS, seed, num_steps, evaluations))
    alone = _alone(job, found, folder, evaluations)
    projection = _projection(job, found, runs, alone, num_steps, evaluations)
    if not with_options:
        return projection
    return replace(
        projection, options=tuple(_options(job, folder, projection, runs[0], alone, num_steps, say))
    )


def _num_steps(job: Job) -> int:
    responses = job.algorithm.prompts_per_step * job.algorithm.group_size
    responses *= 1 if job.episodes is None else job.episodes.max_turns  # each is as dear to simulate
    affordable = MOST_RESPONSES // (SEEDS * responses)
    return min(job.algorithm.steps, MOST_STEPS, max(FEWEST_STEPS, affordable))


def _alone(job: Job, found: SimulatedJob, folder: Path, evaluations: PlannedEvaluations) -> _Run | None:
    if not found.preset.reserved_engines:
        return None
    steps = min(ALONE_STEPS, job.algorithm.steps)
    return _run(job, found, market_of(job, folder, 0), BASELINE, 0, steps, evaluations)


def _run(
    job: Job,
    found: SimulatedJob,
    market: Trace,
    policy: str,
    seed: int,
    num_steps: int,
    evaluations: PlannedEvaluations,
) -> _Run:
    assumptions = replace(found.preset.assumptions, startup_s=found.startup_s)
    preset = replace(found.preset, assumptions=assumptions)
    workload = preset.workload
    requests = workload.responses * (1.0 if workload.turns is None else 1.0 + 1.5 * workload.turns.mean)
    turns, most = 0, _MOST_TURNS * requests * (num_steps + 1)

    def turn(_now: float) -> None:
        nonlocal turns
        turns += 1
        if turns > most:
            raise ValueError("no step ends: no instance lives long enough to roll out")

    try:
        result = simulate(preset, market, policy, seed=seed, hours=1e6, max_steps=num_steps, progress=turn)
    except ValueError as exc:
        raise ConfigError(f"{job.name} cannot be simulated: {exc}", "see `rlboost simulate`") from None
    return _continued(result, preset, found, job.algorithm.steps, evaluations)


def _continued(
    result: SimResult, preset: Preset, found: SimulatedJob, steps: int, evaluations: PlannedEvaluations
) -> _Run:
    """Return the run of all `steps`, and its evaluations, that begins as simulated."""
    rows, startup_usd = result.rows, result.bill["start-up"]
    starts = [row.started_s for row in rows] + [result.seconds]
    periods = [after - before for before, after in pairwise(starts)]
    settled = slice(min(SETTLING_STEPS, len(rows) // 2), None)

    def whole(values: Sequence[float]) -> float:
        return sum(values) + (steps - len(values)) * fmean(values[settled])

    body_s, usd = whole(periods), whole([row.usd for row in rows])
    eval_s = evaluations.seconds(rows[settled], preset)
    eval_usd = eval_s * usd / body_s
    body_s, usd = body_s + eval_s, usd + eval_usd
    seconds, growth = rows[0].started_s + body_s, steps / len(rows)
    simulated = sum(row.usd for row in rows)
    reserved_usd = preset.reserved_usd_per_hour * seconds / 3600.0
    total = startup_usd + usd
    away_usd = max(0.0, total - reserved_usd)  # spot machines and egress, in their simulated proportion
    simulated_away = result.bill["spot"] + result.bill["egress"]
    scale = away_usd / simulated_away if simulated_away else growth
    spot_usd, egress_usd = result.bill["spot"] * scale, result.bill["egress"] * scale
    spot_hours = result.bill["spot hours"] * scale
    more = (total / (startup_usd + simulated)) if startup_usd + simulated else growth
    booting = _boot_s(result) / 3600.0 * scale * (spot_usd / spot_hours if spot_hours else 0.0)
    storage = found.reserved_storage_usd_per_hour * seconds / 3600.0
    spot_storage = found.spot_storage_usd_per_hour * spot_hours
    return _Run(
        seconds=seconds,
        usd=total,
        tokens=whole([float(row.tokens) for row in rows]),
        preemptions=result.preemptions * more,
        spot_hours=spot_hours,
        evaluation_s=eval_s,
        evaluation_usd=eval_usd,
        parts=PlannedParts(
            steps=steps,
            hours=seconds / 3600.0,
            spot_hours=spot_hours,
            startup_usd=startup_usd,
            reserved_usd=reserved_usd - storage,
            spot_usd=max(0.0, spot_usd - spot_storage),
            boot_usd=min(booting, spot_usd),
            egress_usd=egress_usd,
            storage_usd=storage + spot_storage,
        ),
    )


def _boot_s(result: SimResult) -> float:
    """Return the seconds of spot machines before their first work, start-up included."""
    total, has_worked = 0.0, set()
    for each in sorted(result.timeline, key=lambda interval: interval.start_s):
        if each.what in ("rollout", "idle"):
            has_worked.add(each.machine)
        elif each.what in ("boot", "pull") and each.machine not in has_worked:
            total += each.end_s - each.start_s
    return total


def _projection(
    job: Job,
    found: SimulatedJob,
    runs: Sequence[_Run],
    alone: _Run | None,
    num_steps: int,
    evaluations: PlannedEvaluations,
) -> Projection:
    usd, tokens = fmean(run.usd for run in runs), fmean(run.tokens for run in runs)
    return Projection(
        hours=_next_run([run.seconds / 3600.0 for run in runs], num_steps / job.algorithm.steps),
        usd=_next_run([run.usd for run in runs], num_steps / job.algorithm.steps),
        tokens=tokens,
        usd_per_million_tokens=1e6 * usd / tokens,
        preemptions=fmean(run.preemptions for run in runs),
        parts=PlannedParts.mean([run.parts for run in runs]),
        on_demand=_on_demand(found.preset, alone, usd, tokens),
        on_demand_hours=None if alone is None else alone.seconds / 3600.0 * tokens / alone.tokens,
        simulated_steps=num_steps,
        is_calibrated=found.measured is not None,
        notes=found.notes,
        evaluations=EvaluationShare(
            times=evaluations.times,
            tokens=evaluations.tokens,
            hours=fmean(run.evaluation_s for run in runs) / 3600.0,
            usd=fmean(run.evaluation_usd for run in runs),
        ),
    )


def _on_demand(preset: Preset, alone: _Run | None, usd: float, tokens: float) -> Counterfactual:
    if alone is None:
        return Counterfactual(basis="not known: the reserved machine has no engines")
    return on_demand_only(
        tokens=round(tokens),
        seconds=alone.seconds * tokens / alone.tokens,
        reserved_micro_usd_per_hour=parse_usd(round(preset.reserved_usd_per_hour, 6)),
        spent_micro_usd=parse_usd(round(usd, 6)),
        basis="simulated, nothing was measured: the same steps on the reserved machine alone",
    )


def _next_run(values: Sequence[float], share: float) -> Estimate:
    """Return the mean and half of the interval of a run of which each value simulated a `share`."""
    found = estimate(values)
    half = None if found.half_width is None else found.half_width * sqrt(1.0 + len(values) * share)
    return Estimate(found.mean, half)


def _options(
    job: Job,
    folder: Path,
    projection: Projection,
    ours: _Run,
    alone: _Run | None,
    num_steps: int,
    say: Say,
) -> list[Option]:
    found = [_option("as in the job file", ours, is_job=True)]
    if alone is not None:
        found.append(_option("on demand only, without spot machines", alone))
    for each in alternatives(job):
        say(f"simulating an alternative: {each.what}")
        run = _try(each, folder, num_steps)
        found += [] if run is None else [_option(each.what, run)]
    # seeds differ more than options do: all are of seed 0, put at the level of the mean over the job's seeds
    if not found[0].usd:
        return []  # nothing has a price: there is nothing to compare
    level = projection.usd_per_million_tokens / found[0].usd_per_million_tokens
    hours = projection.hours.mean / found[0].hours
    leveled = [
        each
        if not each.is_job and each.what.startswith("on demand")
        else replace(
            each,
            usd=each.usd * projection.usd.mean / found[0].usd,
            hours=each.hours * hours,
            usd_per_million_tokens=each.usd_per_million_tokens * level,
        )
        for each in found
    ]
    return sorted(leveled, key=lambda option: option.usd_per_million_tokens)


def _try(each: Alternative, folder: Path, num_steps: int) -> _Run | None:
    """Return the alternative on the job's first stretch of the market; None where it cannot be simulated."""
    try:
        simulated = simulated_job(each.job, folder)
        evaluations = planned_evaluations(each.job, folder, simulated.preset)
        return _run(each.job, simulated, market_of(each.job, folder, 0), OURS, 0, num_steps, evaluations)
    except RLBoostError:
        return None


def _option(what: str, run: _Run, *, is_job: bool = False) -> Option:
    return Option(what, run.seconds / 3600.0, run.usd, 1e6 * run.usd / run.tokens, is_job)
