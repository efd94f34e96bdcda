"""Quiet against stormy in figures.

The question was fixed before the first run: with d(k) the difference (stormy - quiet) of seed k's mean reward
over the last five steps, is |mean d| <= 2 standard errors of that mean, sd(d) / sqrt(n)? Seeds are paired
because a seed's two runs share initial weights and prompts; the unpaired standard error is given beside it.

With n seeds and no true difference, such a test fails by chance in some 10 % of cases (t distribution), and a
difference smaller than the interval given may be there and not be seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.learning.conditions import QUIET, STORMY
from benchmarks.learning.evidence import RunRecord

LAST = 5
"""Steps at the end, and at the beginning, over which a run's reward is averaged."""
MAX_STANDARD_ERRORS = 2.0
MIN_KILLS_IN_ROLLOUT = 8
"""A stormy run with fewer was no storm."""
MIN_LIFT = 1.2
"""Mean of last five over first five, over seeds: without learning there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Stormy minus quiet, last-five mean reward."""

    mean: float
    standard_error: float
    """Of the paired differences' mean."""
    unpaired_standard_error: float

    @property
    def in_standard_errors(self) -> float:
        """Return |mean| in standard errors."""
        if self.standard_error == 0:
            return 0.0 if self.mean == 0 else math.inf
        return abs(self.mean) / self.standard_error


def first(record: RunRecord) -> float:
    """Return the mean reward of the run's first steps."""
    return statistics.fmean(record.rewards[:LAST])


def last(record: RunRecord) -> float:
    """Return the mean reward of the run's last steps."""
    return statistics.fmean(record.rewards[-LAST:])


def difference(quiet: Sequence[float], stormy: Sequence[float]) -> Difference:
    """Return the difference of paired figures, seed by seed; two pairs or more."""
    pairs = [s - q for q, s in zip(quiet, stormy, strict=True)]
    n = len(pairs)
    return Difference(
        statistics.fmean(pairs),
        statistics.stdev(pairs) / math.sqrt(n),
        math.sqrt((statistics.variance(quiet) + statistics.variance(stormy)) / n),
    )


def void_reason(record: RunRecord) -> str | None:
    """Return why a run was not what its name says; None where it was. Rewards have no say in it."""
    lost = sum(record.losses.values())
    if record.condition == QUIET and lost:
        return f"{lost} instances were lost in a quiet run"
    if record.condition == STORMY and record.kills_in_rollout < MIN_KILLS_IN_ROLLOUT:
        return f"{record.kills_in_rollout} kills inside rollouts, {MIN_KILLS_IN_ROLLOUT} are wanted"
    return None


def by_condition(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return each condition's records in order of their seeds. Raises `ValueError` where one has no pair."""
    found = {
        condition: sorted((r for r in records if r.condition == condition), key=lambda r: r.seed)
        for condition in (QUIET, STORMY)
    }
    if [r.seed for r in found[QUIET]] != [r.seed for r in found[STORMY]]:
        raise ValueError("each seed needs a quiet and a stormy run")
    return found


def verdicts(records: Sequence[RunRecord]) -> dict[str, bool]:
    """Return every condition of the claim, and whether it holds."""
    runs = by_condition(records)
    quiet, stormy = runs[QUIET], runs[STORMY]
    found = difference([last(r) for r in quiet], [last(r) for r in stormy])
    return {
        f"|difference| <= {MAX_STANDARD_ERRORS:g} standard errors": found.in_standard_errors
        <= MAX_STANDARD_ERRORS,
        "five seeds or more": len(quiet) >= 5,
        f"both learn: mean lift >= {MIN_LIFT}": all(_lift(each) >= MIN_LIFT for each in (quiet, stormy)),
        f"quiet runs lost nothing, stormy ones had >= {MIN_KILLS_IN_ROLLOUT} kills inside rollouts": all(
            void_reason(r) is None for r in records
        ),
        "every run is done and audited clean": all(
            r.state == "done" and not r.audit_problems for r in records
        ),
        "all runs are of one commit": len({r.commit for r in records}) == 1,
    }


def summary(records: Sequence[RunRecord]) -> dict[str, Any]:  # JSON
    """Return the figures, rounded for people; `runs` in full are kept beside it."""
    runs = by_condition(records)
    quiet, stormy = runs[QUIET], runs[STORMY]
    found = difference([last(r) for r in quiet], [last(r) for r in stormy])
    return {
        "difference": round(found.mean, 4),
        "standard_error": round(found.standard_error, 4),
        "in_standard_errors": round(found.in_standard_errors, 2),
        "unpaired_standard_error": round(found.unpaired_standard_error, 4),
        "lift": {condition: round(_lift(each), 3) for condition, each in runs.items()},
        "seeds": [_row(q, s) for q, s in zip(quiet, stormy, strict=True)],
        "kills_in_rollout": sum(r.kills_in_rollout for r in stormy),
        "responses_migrated": sum(r.responses["migrated"] for r in stormy),
        "mismatch_kl_max": max(r.mismatch_kl_max for r in records),
        "verdicts": verdicts(records),
    }


def _lift(records: Sequence[RunRecord]) -> float:
    return statistics.fmean(last(r) for r in records) / statistics.fmean(first(r) for r in records)


def _row(quiet: RunRecord, stormy: RunRecord) -> dict[str, Any]:  # JSON
    return {
        "seed": quiet.seed,
        "first5": {QUIET: round(first(quiet), 4), STORMY: round(first(stormy), 4)},
        "last5": {QUIET: round(last(quiet), 4), STORMY: round(last(stormy), 4)},
        "difference": round(last(stormy) - last(quiet), 4),
        "kills_in_rollout": stormy.kills_in_rollout,
        "notices_in_rollout": stormy.notices_in_rollout,
        "responses_interrupted": stormy.responses_interrupted,
        "responses_migrated": {QUIET: quiet.responses["migrated"], STORMY: stormy.responses["migrated"]},
        "seconds": {QUIET: quiet.seconds, STORMY: stormy.seconds},
    }
