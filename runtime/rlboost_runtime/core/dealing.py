"""Dispatch rules of the baselines: whole groups dealt out, without regard to how full an engine is.

- `EvenDeal`: what a co-located trainer does (veRL): the step's groups are cut into as many equal runs as
  there are reserved engines, once, when all of them serve; the engines queue what does not fit.
- `PacedDeal`: what the published code of the paper does (PolyRL, balance.rs and handlers.rs): up to four
  groups a second for the whole fleet, in turn to instances that report an empty queue. A group moves as a
  whole: its unfinished responses continue from the shortest one's length, and what the others had beyond is
  generated again.

Both give a lost instance's responses to whoever serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rlboost_runtime.core.context import Context
from rlboost_runtime.core.instances import Instance, Roster
from rlboost_runtime.core.responses import Response, StepBook
from rlboost_runtime.core.timers import Timer
from rlboost_runtime.core.waiting import WaitingQueue

PACE_S = 1.0
"""Seconds between two looks at the instances' queues."""
GROUPS_PER_LOOK = 4
"""`max_assigned_batches_per_stats_check` of the published code, for the whole fleet."""


@dataclass(slots=True)
class EvenDeal:
    """Equal runs of groups to all reserved engines at once."""

    roster: Roster

    def deal(self, queue: WaitingQueue, able: Mapping[str, Instance]) -> Iterator[tuple[Response, Instance]]:
        """Yield who gets what; nothing while a reserved engine is still to come."""
        names = sorted(able)
        if not names or not able.keys() >= self.roster.reserved.keys():
            return
        waiting = sorted(queue.all(), key=lambda r: r.order)
        queue.clear()
        groups = {group: rank for rank, group in enumerate(dict.fromkeys(r.group for r in waiting))}
        for response in waiting:
            yield response, able[names[groups[response.group] * len(names) // len(groups)]]


@dataclass(slots=True)
class PacedDeal:
    """A few groups a second, in turn."""

    context: Context
    _look_at: float = 0.0
    _left: int = 0
    _turn: int = 0
    _stuck: list[Response] = field(default_factory=list)

    def deal(
        self, queue: WaitingQueue, able: Mapping[str, Instance], book: StepBook
    ) -> Iterator[tuple[Response, Instance]]:
        """Yield who gets what; the rest waits for the next look."""
        if self.context.now >= self._look_at:
            self._look_at = self.context.now + PACE_S
            self._left = GROUPS_PER_LOOK
        names = sorted(able)
        while names and self._left and (response := queue.peek()) is not None:
            members = [r for r in book.members_of(response.group) if r.finish_reason is None]
            is_whole = all(r.assignment is None for r in members)
            choice = self._next_free(names, able) if is_whole else None
            if choice is None and is_whole:
                break
            if choice is None:  # siblings are still to be released
                self._stuck.append(queue.pop())
                continue
            self._left -= 1
            kept = min(r.num_tokens for r in members)
            for member in members:
                if member.num_tokens > kept:
                    member.drop_tokens_beyond(kept)
                yield member, choice
        for response in self._stuck:
            queue.add(response)
        self._stuck.clear()
        if queue.peek() is not None:
            self.context.timers.set(Timer.PACE, "", self._look_at)

    def _next_free(self, names: list[str], able: Mapping[str, Instance]) -> Instance | None:
        for _ in names:
            instance = able[names[self._turn % len(names)]]
            self._turn += 1
            if not instance.num_queued and instance.num_assigned < max(1, instance.max_running):
                return instance
        return None
