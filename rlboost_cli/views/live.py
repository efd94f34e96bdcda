"""The attached view: one block of lines on a terminal that shows how a run is doing, until it ends.

It never scrolls, sends only what changed, and not oftener than statuses come (about once a second).

A followed run as plain lines, for files and terminals that cannot repaint: a line per step and per event,
and now and then one that says that the run lives.

"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

from rlboost_cli.runs.run_status import RunStatus
from rlboost_cli.terminal.screen import Painter, Size, glyphs_for, has_style
from rlboost_cli.terminal.text import usd
from rlboost_cli.views.events import event_line, merged
from rlboost_cli.views.run_view import live_lines, tokens_per_s

_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def watch(statuses: Iterable[RunStatus], stream: TextIO) -> None:
    """Show statuses on the terminal `stream` until they end, or until Ctrl-C; the last one stays."""
    painter, glyphs = Painter(stream, has_style=has_style(stream)), glyphs_for(stream)
    last: RunStatus | None = None

    def paint(found: RunStatus, *, is_last: bool = False) -> None:
        size = Size(*shutil.get_terminal_size())
        painter.paint(live_lines(found, size, glyphs, is_last=is_last), size)

    stream.write(_HIDE_CURSOR)
    try:
        for last in statuses:
            paint(last)
    except KeyboardInterrupt:
        if last is not None:
            paint(last, is_last=True)
        raise
    finally:
        stream.write("\r" + _SHOW_CURSOR)
        stream.flush()


HEARTBEAT_S = 30.0
"""After so long without a line, one says what goes on."""


@dataclass(slots=True)
class NewLines:
    """Turns statuses into lines, each told once."""

    clock: Callable[[], float] = time.monotonic
    _steps: int | None = None
    _seen: set[tuple[float, str, str]] = field(default_factory=set)
    _silence: str | None = None
    _phase: str = ""
    _said_at: float | None = None

    def of(self, status: RunStatus) -> list[str]:
        """Return what is new since the last call, oldest first."""
        data = status.data
        lines = [*self._silences(status), *self._phases(data), *self._events(data), *self._trained(data)]
        now = self.clock()
        if not lines and self._said_at is not None and now - self._said_at >= HEARTBEAT_S:
            lines = [_heartbeat(data)]
        if lines or self._said_at is None:
            self._said_at = now
        return lines

    def _silences(self, status: RunStatus) -> list[str]:
        was_silent, self._silence = self._silence, status.problem
        if (was_silent is None) == (status.problem is None):
            return []
        if status.problem is None:
            return ["the coordinator answers again"]
        is_started = status.is_supervised and status.is_reached
        return [status.problem + ("; it is started again" if is_started else "")]

    def _phases(self, data: dict[str, Any]) -> list[str]:
        """Before the first step there are no steps to tell of."""
        phase = str(data.get("phase") or "")
        if data.get("state") != "provisioning" or phase in ("", self._phase):
            return []
        self._phase = phase
        return [_at(data, phase)]

    def _events(self, data: dict[str, Any]) -> list[str]:
        new = []
        for event in data.get("events") or []:
            key = (float(event.get("at", 0)), str(event.get("kind", "")), str(event.get("text", "")))
            if key not in self._seen:
                self._seen.add(key)
                new.append(event)
        return [event_line(event) for event in merged(new) if event.get("kind") != "step"]

    def _trained(self, data: dict[str, Any]) -> list[str]:
        trained = int(data.get("step") or 0)
        if self._steps is None:  # attached to a run that has been going on: its past is not news
            self._steps = max(0, trained - 1)
        first, self._steps = self._steps, max(trained, self._steps)
        rewards = list(data.get("reward_history") or [])
        return [_step(data, number, rewards, trained) for number in range(first + 1, trained + 1)]


def _step(data: dict[str, Any], number: int, rewards: list[Any], trained: int) -> str:
    index = len(rewards) - 1 - (trained - number)
    reward = rewards[index] if 0 <= index < len(rewards) else None
    parts = [f"step {number}/{data.get('steps', '?')}"]
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if number == trained:
        parts += [tokens_per_s(data), usd((data.get("cost") or {}).get("spent_usd"))]
    return _at(data, "  ".join(parts))


def _heartbeat(data: dict[str, Any]) -> str:
    serving = sum(i.get("state") == "ready" for i in data.get("instances") or [])
    words = [f"step {data.get('step', 0)}/{data.get('steps', '?')}"]
    words.append(str(data.get("phase") or data.get("state", "")))
    words += [f"{serving} instances ready", tokens_per_s(data)]
    words.append(usd((data.get("cost") or {}).get("spent_usd")))
    return _at(data, ", ".join(words))


def _at(data: dict[str, Any], words: str) -> str:
    return event_line({"at": data["at"], "text": words}) if data.get("at") is not None else words
