"""The book of steps: what each trained step made, and how long it took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlboost_runtime.coordinator.accounts import to_ns
from rlboost_runtime.coordinator.ledger_file import LedgerFile


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One trained step. Times in nanoseconds since the Unix epoch; `tokens` are those trained on."""

    step: int
    started_ns: int
    ended_ns: int
    tokens: int
    reward_mean: float | None
    metrics: dict[str, float]


class StepSummary(NamedTuple):
    """All trained steps in three figures."""

    num_steps: int
    tokens: int
    """Trained on, in all steps."""
    reward_means: list[float | None]
    """Of the last steps, oldest first."""


class StepBook(LedgerFile):
    """Trained steps. A recorded step has committed to stable storage."""

    def record_step(
        self,
        step: int,
        *,
        started_at: float,
        ended_at: float,
        tokens: int,
        reward_mean: float | None,
        metrics: Mapping[str, float],
    ) -> None:
        """Note a trained step. A step trained again keeps its first start; the last word holds otherwise."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO steps (step, started_at, ended_at, tokens, reward_mean, metrics)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (step) DO UPDATE SET"
                " started_at = min(started_at, excluded.started_at), ended_at = excluded.ended_at,"
                " tokens = excluded.tokens, reward_mean = excluded.reward_mean, metrics = excluded.metrics",
                (step, to_ns(started_at), to_ns(ended_at), tokens, reward_mean, json.dumps(dict(metrics))),
            )

    def steps(self) -> list[StepRecord]:
        """Return the trained steps in order."""
        rows = self._rows(
            "SELECT step, started_at, ended_at, tokens, reward_mean, metrics FROM steps ORDER BY step"
        )
        return [
            StepRecord(int(step), int(start), int(end), int(tokens), reward, json.loads(metrics))
            for step, start, end, tokens, reward, metrics in rows
        ]

    def step_summary(self, last: int) -> StepSummary:
        """Return how many steps were trained, on how many tokens, and the rewards of the `last` ones.

        Costs little however many there are, unlike `steps`.
        """
        (totals,) = self._rows("SELECT count(*), coalesce(sum(tokens), 0) FROM steps")
        rewards = self._rows("SELECT reward_mean FROM steps ORDER BY step DESC LIMIT ?", (last,))
        return StepSummary(int(totals[0]), int(totals[1]), [row[0] for row in reversed(rewards)])
