"""A run that is followed until it ends, and how it ended.

`watch` is the attached view: one block of lines on a terminal, which never scrolls and sends only what
changed, as often as statuses come (about once a second).

`NewLines` is the same as plain lines, for files and terminals that cannot repaint: a line per step and per
event, and a heartbeat where nothing happens.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from rlboost_cli.runs.run_status import RunStatus, run_status
from rlboost_cli.runs.supervision import log_tail
from rlboost_cli.terminal.screen import Painter, Size, glyphs_for, has_style
from rlboost_cli.terminal.text import ENDED, usd
from rlboost_cli.views.events import event_line, merged, timed
from rlboost_cli.views.run_view import live_lines, tokens_per_s
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.index import is_supervised

if TYPE_CHECKING:
    from rlboost_cli.head.connection import Head
    from rlboost_runtime.protocol.status import RecentEvent, Status

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
"""After so long without a line, a heartbeat is printed."""


@dataclass(slots=True)
class NewLines:
    """Turns statuses into lines, each printed once."""

    clock: Callable[[], float] = time.monotonic
    _steps: int | None = None
    _last: tuple[int, float] | None = None
    """Tokens trained when the last step was seen to end, and when."""
    _seen: set[tuple[float, str, str]] = field(default_factory=set)
    _silence: str | None = None
    _phase: str = ""
    _said_at: float | None = None

    def of(self, found: RunStatus) -> list[str]:
        """Return what is new since the last call, oldest first."""
        data = found.status
        new = self._events(data)
        ends = [event for event in new if _is_end(event)]
        others = [event for event in new if not _is_end(event)]
        lines = [*self._silences(found), *self._phases(data), *_event_lines(others)]
        lines += [*self._trained(data), *_event_lines(ends)]  # the last step was trained before the end
        now = self.clock()
        if not lines and self._said_at is not None and now - self._said_at >= HEARTBEAT_S:
            lines = [_heartbeat(data)]
        if lines or self._said_at is None:
            self._said_at = now
        return lines

    def _silences(self, found: RunStatus) -> list[str]:
        was_silent, self._silence = self._silence, found.problem
        if (was_silent is None) == (found.problem is None):
            return []
        if found.problem is None:
            return ["the coordinator is answering again"]
        is_started = found.is_supervised and found.is_reached
        return [found.problem + ("; it is being restarted" if is_started else "")]

    def _phases(self, status: Status) -> list[str]:
        """Return the phase before the first step, when it is new."""
        phase = status.phase or ""
        if status.state != "provisioning" or phase in ("", self._phase):
            return []
        self._phase = phase
        return [_at(status, phase)]

    def _events(self, status: Status) -> list[RecentEvent]:
        """Return what is new; at the first look at a run that was resumed, what came after its former end."""
        is_first = not self._seen
        new = []
        for event in status.events:
            key = (event.at, event.kind, event.text)
            if key not in self._seen:
                self._seen.add(key)
                new.append(event)
            if is_first and _is_end(event) and status.state not in ENDED:
                new.clear()
        return new

    def _trained(self, status: Status) -> list[str]:
        trained = status.step
        if self._steps is None:  # attached to a run that has been going on: its past is not new
            self._steps = max(0, trained - 1)
        first, self._steps = self._steps, max(trained, self._steps)
        speed = self._speed(status, trained - first) if trained > first else None
        return [_step(status, number, speed) for number in range(first + 1, trained + 1)]

    def _speed(self, status: Status, num_steps: int) -> float | None:
        """Return the tokens trained per second of the newest step; None where its start was not seen."""
        now, trained = status.at or 0.0, status.tokens.trained
        last, self._last = self._last, (trained, now)
        if last is None or num_steps != 1 or now <= last[1]:
            return None
        return (trained - last[0]) / (now - last[1])


def _is_end(event: RecentEvent) -> bool:
    """Return True if it says that the run, not one of its machines, has ended."""
    return event.kind == "ended" and event.text.startswith("run ")


def _event_lines(events: Sequence[RecentEvent]) -> list[str]:
    return [event_line(event) for event in merged(events) if event.kind != "step"]


def _step(status: Status, number: int, speed: float | None) -> str:
    rewards = status.reward_history
    index = len(rewards) - 1 - (status.step - number)
    reward = rewards[index] if 0 <= index < len(rewards) else None
    parts = [_progress(number, status.steps)]
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if number == status.step:
        parts += [] if speed is None else [f"{speed:,.0f} tokens/s"]
        parts.append(usd(status.cost.spent_usd))
    return _at(status, "  ".join(parts))


def _progress(step: int, steps: int | None) -> str:
    return f"step {step}/{'?' if steps is None else steps}"


def _heartbeat(status: Status) -> str:
    ready = sum(i.state == "ready" for i in status.instances)
    served = None if status.serving is None else f"{status.serving.finished:,} requests answered"
    words = [served or _progress(status.step, status.steps), status.phase or status.state]
    words += [f"{ready} instances ready", tokens_per_s(status), usd(status.cost.spent_usd)]
    return _at(status, ", ".join(words))


def _at(status: Status, words: str) -> str:
    return words if status.at is None else timed(status.at, words)


EVERY_S = 1.0
"""Between two looks: the coordinator counts its rates anew once a second."""
ABANDONED_S = 5.0
"""Without an answer and without a supervisor for this long, nobody will bring the run back by itself."""


def follow(run: RunFolder, every_s: float = EVERY_S) -> Iterator[RunStatus]:
    """Yield the run's status every `every_s` seconds; the last one yielded is of the ended run. Raises
    `RuntimeFault` once nothing runs it any more although it has not ended."""
    alone_since: float | None = None
    with _head_of(run) if run.head.exists() else contextlib.nullcontext() as head:
        while True:
            status = run_status(run, head=head)
            yield status
            if status.has_ended:
                return
            if status.is_live or not status.is_reached or is_supervised(run):
                alone_since = None
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > ABANDONED_S:
                raise _abandoned(run)
            time.sleep(every_s)


def _head_of(run: RunFolder) -> Head:
    from rlboost_cli.head.connection import Head

    return Head(run)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: str
    problem: str
    remedy: str
    exit_code: int
    warning: str = ""
    """Why machines may still cost money."""


def outcome_of(run: RunFolder) -> Outcome:
    """Return how the ended run ended."""
    data: dict[str, Any] = read_json(run.outcome) or {}
    state = str(data.get("state", "stopped"))
    exit_code = int(data.get("exit_code", 0 if state == "done" else 1))
    problem, remedy, warning = (str(data.get(name) or "") for name in ("problem", "remedy", "warning"))
    return Outcome(state, problem, remedy, exit_code, warning)


def _abandoned(run: RunFolder) -> RuntimeFault:
    path = run.logs / "supervisor.log"
    return RuntimeFault(
        f"{run.name} has not ended, but its processes are gone; last lines of {path}:\n{log_tail(path)}",
        f"rlboost launch {run.name} continues from its last checkpoint; rlboost down {run.name} ends it",
    )
