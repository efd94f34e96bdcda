"""Virtual time: actions at moments, in order; those of the same moment in the order in which they were
set."""

from __future__ import annotations

import heapq
from collections.abc import Callable

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
