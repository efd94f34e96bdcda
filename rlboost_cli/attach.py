"""Following a run until it ends: statuses to show, and the lines that are new since the last one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlboost_cli.run_status import RunStatus, run_status
from rlboost_cli.supervision import is_supervised, log_tail
from rlboost_cli.text import event_line, tokens_per_s, usd
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run_folder import RunFolder, read_json

ABANDONED_S = 5.0
"""Without an answer and without a supervisor for this long, nobody will bring the run back by itself."""


def follow(run: RunFolder, every_s: float = 0.5) -> Iterator[RunStatus]:
    """Yield the run's status every `every_s` seconds; the last one yielded is of the ended run.

    Raises `RuntimeFault` once nothing runs it any more although it has not ended.
    """
    alone_since: float | None = None
    while True:
        status = run_status(run)
        yield status
        if status.has_ended:
            return
        if status.is_live or is_supervised(run):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > ABANDONED_S:
            raise _abandoned(run)
        time.sleep(every_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: str
    problem: str
    remedy: str
    exit_code: int


def outcome_of(run: RunFolder) -> Outcome:
    """Return how the ended run ended."""
    data: dict[str, Any] = read_json(run.outcome) or {}
    state = str(data.get("state", "stopped"))
    exit_code = int(data.get("exit_code", 0 if state == "done" else 1))
    return Outcome(state, str(data.get("problem") or ""), str(data.get("remedy") or ""), exit_code)


@dataclass(slots=True)
class NewLines:
    """Turns statuses into plain lines: one per trained step and one per event, each once."""

    _steps: int | None = None
    _seen: set[tuple[float, str, str]] = field(default_factory=set)
    _was_silent: bool = False

    def of(self, status: RunStatus) -> list[str]:
        """Return what is new since the last call, oldest first."""
        return [*self._silence(status), *self._events(status.data), *self._trained(status.data)]

    def _silence(self, status: RunStatus) -> list[str]:
        is_silent = status.problem is not None
        changed, self._was_silent = is_silent != self._was_silent, is_silent
        if not changed:
            return []
        return [status.problem if status.problem is not None else "the coordinator answers again"]

    def _events(self, data: dict[str, Any]) -> list[str]:
        lines = []
        for event in data.get("events") or []:
            key = (float(event.get("at", 0)), str(event.get("kind", "")), str(event.get("text", "")))
            if key not in self._seen:
                self._seen.add(key)
                lines.append(event_line(event))
        return lines

    def _trained(self, data: dict[str, Any]) -> list[str]:
        trained = int(data.get("step") or 0)
        if self._steps is None:  # attached to a run that has been going on: its past is not news
            self._steps = max(0, trained - 1)
        first, self._steps = self._steps, max(trained, self._steps)
        rewards = list(data.get("reward_history") or [])
        return [self._step(data, number, rewards, trained) for number in range(first + 1, trained + 1)]

    def _step(self, data: dict[str, Any], number: int, rewards: list[Any], trained: int) -> str:
        index = len(rewards) - 1 - (trained - number)
        reward = rewards[index] if 0 <= index < len(rewards) else None
        parts = [f"step {number}/{data.get('steps', '?')}"]
        if reward is not None:
            parts.append(f"reward {reward:.3f}")
        if number == trained:
            parts += [tokens_per_s(data), usd((data.get("cost") or {}).get("spent_usd"))]
        return "  ".join(parts)


def _abandoned(run: RunFolder) -> RuntimeFault:
    path = run.logs / "supervisor.log"
    return RuntimeFault(
        f"nothing runs {run.name} any more, though it has not ended; last lines of {path}:\n{log_tail(path)}",
        f"rlboost launch {run.name} goes on from its last checkpoint; rlboost down {run.name} ends it",
    )
