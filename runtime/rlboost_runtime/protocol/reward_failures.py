"""Counting responses whose reward failed: kinds, the metrics that carry them, and texts for users.

The trainer decides and counts (`trainer.rewards.outcome` states the rule); coordinator, cost report and CLI
only add up and report. Pure; standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

SCORED_METRIC = "responses_scored"
"""Metric of a step: responses that got a reward, by the function or by the rule."""


class RewardFailure(StrEnum):
    """Why a response scored 0 by rule."""

    RAISED = "raised"
    """The function raised, or the endpoint answered with an error."""
    TIMEOUT = "timeout"
    """It took longer than reward_timeout_s."""
    MEMORY = "memory"
    """It needed more than reward_memory_mib."""
    DIED = "died"
    """Its process ended."""
    NOT_FINITE = "not_finite"
    """It returned nan or an infinity."""
    NOT_A_NUMBER = "not_a_number"
    """It returned something else."""


WORDS = {
    RewardFailure.RAISED: "raised an error",
    RewardFailure.TIMEOUT: "took too long",
    RewardFailure.MEMORY: "ran out of memory",
    RewardFailure.DIED: "ended its process",
    RewardFailure.NOT_FINITE: "was no finite number",
    RewardFailure.NOT_A_NUMBER: "was no number",
}
"""What the reward did, in words."""


def metric_of(kind: RewardFailure) -> str:
    """Return the name of the metric that counts failures of this kind in a step."""
    return f"reward_failures_{kind}"


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures over some steps. `scored`: responses of those steps, failures included."""

    scored: int
    by_kind: Mapping[RewardFailure, int]

    @property
    def failed(self) -> int:
        """Responses that scored 0 by rule."""
        return sum(self.by_kind.values())

    def as_json(self) -> dict[str, int]:
        """Return `scored`, `failed` and a number per kind."""
        return {"scored": self.scored, "failed": self.failed, **{str(k): n for k, n in self.by_kind.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, int]) -> FailureCount:
        """Return what `as_json` was made from; what is missing counts as 0."""
        return cls(data.get("scored", 0), {kind: data.get(str(kind), 0) for kind in RewardFailure})

    def in_words(self) -> str:
        """Return e.g. `3 of 64 responses scored 0 because their reward failed (2 took too long, 1 ...)`."""
        kinds = ", ".join(f"{count} {WORDS[kind]}" for kind, count in self.by_kind.items() if count)
        whole = f"{self.failed:,} of {self.scored:,}" if self.scored else f"{self.failed:,}"
        return f"{whole} responses scored 0 because their reward failed ({kinds})"


def count_failures(steps: Iterable[Mapping[str, float]]) -> FailureCount:
    """Add up the steps' metrics; a step without these metrics counts as one without failures."""
    by_kind = dict.fromkeys(RewardFailure, 0)
    scored = 0
    for metrics in steps:
        scored += int(metrics.get(SCORED_METRIC, 0))
        for kind in RewardFailure:
            by_kind[kind] += int(metrics.get(metric_of(kind), 0))
    return FailureCount(scored, by_kind)
