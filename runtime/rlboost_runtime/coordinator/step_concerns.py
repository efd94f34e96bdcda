"""What the metrics of trained steps say that a person must know: failed rewards, prompts that are left out.

Calm: failures are told when they first occur and each time their number has doubled; the totals of the run
are in the status and in the cost report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlboost_runtime.reward_failures import FailureCount, RewardFailure, count_failures

Line = tuple[str, str]
"""(kind, text) of an event in words."""


class StepConcerns:
    """Totals over the run's steps, and what is new about them."""

    def __init__(self, before: Iterable[Mapping[str, float]]) -> None:
        """`before`: metrics of the steps that a former coordinator has told about."""
        known = list(before)
        self._count = count_failures(known)
        self._told = self._count.failed
        self._skipped_told = bool(known)

    @property
    def rewards(self) -> FailureCount:
        """Failed rewards of the run so far."""
        return self._count

    def trained(self, step: int, metrics: Mapping[str, float]) -> list[Line]:
        """Take in a step's metrics; return what is to be told about it. `step` counts from 0."""
        lines: list[Line] = []
        skipped = int(metrics.get("prompts_skipped", 0))
        if skipped and not self._skipped_told:
            what = "1 prompt is" if skipped == 1 else f"{skipped:,} prompts are"
            lines.append(("data", f"{what} longer than algorithm.max_prompt_tokens and left out"))
        self._skipped_told = True
        now = count_failures([metrics])
        self._count = FailureCount(
            self._count.scored + now.scored,
            {kind: self._count.by_kind[kind] + now.by_kind[kind] for kind in RewardFailure},
        )
        if now.failed and self._count.failed >= 2 * self._told:
            self._told = self._count.failed
            lines.append(("reward", f"step {step + 1}: {now.in_words()}"))
        return lines
