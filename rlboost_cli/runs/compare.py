"""Runs beside one another: how their jobs differ, and how far each was at the same step, token or dollar.

Everything comes from the runs' ledgers and resolved jobs. Tokens are trained response tokens. Seconds count
from the start of a run's first step; dollars also have what was spent before it. Steps count from 1.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from rlboost_cli.runs.metrics import history_of
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.report import CostReport
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.health.glossary import evaluation_metric
from rlboost_runtime.run.checkpoints import ancestors_of
from rlboost_runtime.run.create import flat_fields
from rlboost_runtime.run.folder import RunFolder, read_json

SEED = "algorithm.seed"
REWARD_STEPS = 10
"""A reward is the mean of so many steps, the newest ones: a single step is noise."""


class RunCurves(msgspec.Struct):
    """A value per trained step."""

    steps: list[int]
    tokens: list[int]
    """Sum up to the step's end, as are the next two."""
    seconds: list[float]
    usd: list[float]
    reward_mean: list[float | None]
    eval_reward_mean: list[float | None]


class RunPoint(msgspec.Struct):
    """A run after one of its steps."""

    step: int
    tokens: int
    seconds: float
    usd: float
    tokens_per_s: float | None
    """Mean up to here."""
    usd_per_million_tokens: float | None
    reward_mean: float | None
    """Mean of the last `REWARD_STEPS` steps."""
    eval_reward_mean: float | None
    """Of the newest evaluation; of several in a job, of the first."""


class RunColumn(msgspec.Struct):
    """One of the runs."""

    run: str
    state: str
    ancestors: list[str]
    """Of a fork: as in its status. Its tokens, seconds and dollars are its own, without its ancestors'."""
    total_usd: float
    """With what was spent after the last step."""
    last: RunPoint | None
    curves: RunCurves


class SamePoint(msgspec.Struct):
    """All runs where they had reached the same."""

    at: float
    """As far as every run has come."""
    runs: dict[str, RunPoint | None]
    """None: the run's first step went beyond that."""


class OverSeeds(msgspec.Struct):
    """Runs whose jobs differ in their seed only, where all of them had reached the same step."""

    runs: list[str]
    fields: dict[str, Any]
    """What tells their jobs from those of the other runs that are compared."""
    step: int
    reward_mean: float | None
    reward_error: float | None
    """Standard error of the mean over the runs, as the next one's; None where a run has no such figure."""
    eval_reward_mean: float | None
    eval_reward_error: float | None
    usd: float
    """Mean over the runs."""


class RunComparison(msgspec.Struct):
    """What `rlboost compare --json` prints."""

    runs: list[RunColumn]
    changed: dict[str, dict[str, Any]]
    """Fields of the job that differ, with their value per run; a run that lacks the field is missing."""
    same: dict[str, SamePoint]
    """By steps, tokens, seconds and usd; empty while a run has no trained step."""
    over_seeds: list[OverSeeds] = []
    """Of two and more runs each."""


def compare_runs(folders: Sequence[RunFolder]) -> RunComparison:
    """Return how the runs compare. Raises `ConfigError` for fewer than two different runs."""
    if len({folder.path for folder in folders}) < max(2, len(folders)):
        raise ConfigError("compare takes two or more different runs", "type: rlboost compare RUN RUN")
    columns = [_column(folder) for folder in folders]
    jobs = {folder.name: dict(flat_fields(read_json(folder.job_json) or {})) for folder in folders}
    changed = _changed(jobs)
    return RunComparison(columns, changed, _same(columns), _over_seeds(columns, changed))


def _changed(jobs: dict[str, dict[str, object]]) -> dict[str, dict[str, Any]]:
    fields = dict.fromkeys(field for job in jobs.values() for field in job if field != "name")
    return {
        field: {name: job[field] for name, job in jobs.items() if field in job}
        for field in fields
        if len({repr(job.get(field, ...)) for job in jobs.values()}) > 1
    }


def _over_seeds(columns: Sequence[RunColumn], changed: dict[str, dict[str, Any]]) -> list[OverSeeds]:
    fields = [field for field in changed if field != SEED]
    groups: dict[str, list[RunColumn]] = {}
    for column in columns:
        groups.setdefault(repr([changed[field].get(column.run, ...) for field in fields]), []).append(column)
    return [
        _mean_of(group, {f: changed[f][group[0].run] for f in fields if group[0].run in changed[f]})
        for group in groups.values()
        if len(group) > 1 and all(column.curves.steps for column in group)
    ]


def _mean_of(group: Sequence[RunColumn], fields: dict[str, Any]) -> OverSeeds:
    step = min(column.curves.steps[-1] for column in group)
    points = [at for column in group if (at := at_value(column.curves, "steps", step)) is not None]
    return OverSeeds(
        [column.run for column in group],
        fields,
        step,
        *_mean_and_error([at.reward_mean for at in points]),
        *_mean_and_error([at.eval_reward_mean for at in points]),
        round(statistics.fmean(at.usd for at in points), 6),
    )


def _mean_and_error(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len(known) < 2:
        return None, None
    return statistics.fmean(known), statistics.stdev(known) / math.sqrt(len(known))


def _column(folder: RunFolder) -> RunColumn:
    report = report_of(folder)
    curves = _curves(report)
    history = history_of(folder)
    rewards = (name for name in history.chosen([], every=True) if evaluation_metric(name))
    first = next((name for name in rewards if name.endswith("reward_mean")), "eval_reward_mean")
    held_out = dict(zip(history.steps, history.values(first), strict=True))
    curves.eval_reward_mean = [held_out.get(step) for step in curves.steps]
    last = point(curves, len(curves.steps) - 1)
    return RunColumn(folder.name, report.state, ancestors_of(folder), report.total_usd, last, curves)


def _curves(report: CostReport) -> RunCurves:
    curves = RunCurves([], [], [], [], [], [])
    tokens, usd, seconds = 0, report.outside_steps_usd.before, 0.0
    for step in report.steps:
        tokens += step.tokens
        usd += step.restart_usd + step.usd
        seconds = max(seconds, step.ended_at - report.steps[0].started_at)
        curves.steps.append(step.step + 1)
        curves.tokens.append(tokens)
        curves.seconds.append(seconds)
        curves.usd.append(round(usd, 6))
        curves.reward_mean.append(step.reward_mean)
    return curves


def point(curves: RunCurves, index: int) -> RunPoint | None:
    """Return the run after the step at `index`; None for -1, before its first."""
    if index < 0:
        return None
    tokens, seconds, usd = curves.tokens[index], curves.seconds[index], curves.usd[index]
    rewards = [r for r in curves.reward_mean[max(0, index + 1 - REWARD_STEPS) : index + 1] if r is not None]
    held_out = [reward for reward in curves.eval_reward_mean[: index + 1] if reward is not None]
    return RunPoint(
        step=curves.steps[index],
        tokens=tokens,
        seconds=round(seconds, 3),
        usd=usd,
        tokens_per_s=tokens / seconds if seconds else None,
        usd_per_million_tokens=1e6 * usd / tokens if tokens else None,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        eval_reward_mean=held_out[-1] if held_out else None,
    )


def at_value(curves: RunCurves, axis: str, value: float) -> RunPoint | None:
    """Return the run after its last step that ended within `value` of `axis`, a field of the curves."""
    return point(curves, bisect_right(getattr(curves, axis), value) - 1)


def _same(columns: Sequence[RunColumn]) -> dict[str, SamePoint]:
    if not all(column.curves.steps for column in columns):
        return {}
    found = {}
    for axis in ("steps", "tokens", "seconds", "usd"):
        value = min(getattr(column.curves, axis)[-1] for column in columns)
        found[axis] = SamePoint(value, {c.run: at_value(c.curves, axis, value) for c in columns})
    return found
