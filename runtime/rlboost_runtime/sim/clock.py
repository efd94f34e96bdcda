"""Virtual time: actions at moments, in order; those of the same moment in the order in which they were
set.

The reserved node's link to the fleet, shared fairly by the transfers that are on it.

Each transfer also has a limit of its own (the receiver's link). Rates change only when a transfer begins or
ends; between that, each one's progress is a straight line.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

Action = Callable[[], None]


class Agenda:
    """What is to happen when. `now` moves only forward, in `step`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._next = 0

    def at(self, when: float, action: Action) -> None:
        """Have `action` happen at `when`, or now if that is over."""
        heapq.heappush(self._heap, (max(when, self.now), self._next, action))
        self._next += 1

    def after(self, seconds: float, action: Action) -> None:
        """Have `action` happen in `seconds`."""
        self.at(self.now + seconds, action)

    def next_time(self) -> float | None:
        """Return when the next action is due."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Go to the next action and let it happen."""
        when, _, action = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        action()


DONE_BYTES = 1.0
"""What may be missing of a transfer that counts as done: rounding of floats."""


@dataclass(slots=True, eq=False)
class SimTransfer:
    """Bytes under way. Made by `SharedLink.start`."""

    left: float
    limit: float
    done: Callable[[], None]
    rate: float = 0.0


class SharedLink:
    """One sender; `rate` bytes per second in all."""

    def __init__(self, agenda: Agenda, rate: float) -> None:
        self._agenda = agenda
        self._rate = rate
        self._active: dict[SimTransfer, None] = {}
        self._since = 0.0
        self._plan = 0
        self._is_planned = False

    def start(self, size: float, limit: float, done: Callable[[], None]) -> SimTransfer:
        """Begin to send `size` bytes at no more than `limit` per second; `done` is called at the end."""
        transfer = SimTransfer(size, limit, done)
        self._catch_up()
        self._active[transfer] = None
        self._replan_soon()
        return transfer

    def cancel(self, transfer: SimTransfer) -> None:
        """Stop a transfer; one that has ended already is fine."""
        if transfer in self._active:
            self._catch_up()
            del self._active[transfer]
            self._replan_soon()

    def _catch_up(self) -> None:
        elapsed = self._agenda.now - self._since
        self._since = self._agenda.now
        if elapsed > 0:
            for transfer in self._active:
                transfer.left -= elapsed * transfer.rate

    def _replan_soon(self) -> None:
        """Plan once for all changes of this moment."""
        if not self._is_planned:
            self._is_planned = True
            self._agenda.after(0.0, self._replan)

    def _replan(self) -> None:
        self._is_planned = False
        self._catch_up()
        done = [t for t in self._active if t.left <= DONE_BYTES]
        for transfer in done:
            del self._active[transfer]
        self._share_out()
        self._plan += 1
        if self._active:
            plan = self._plan
            soonest = min(t.left / t.rate for t in self._active)
            self._agenda.after(soonest, lambda: self._replan() if plan == self._plan else None)
        for transfer in done:
            transfer.done()

    def _share_out(self) -> None:
        """Max-min fairness: those with a small limit first, what they leave goes to the others."""
        left, count = self._rate, len(self._active)
        for transfer in sorted(self._active, key=lambda t: t.limit):
            transfer.rate = min(transfer.limit, left / count)
            left -= transfer.rate
            count -= 1
