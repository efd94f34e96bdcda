"""Dispatch rules of the baselines: whole groups dealt out, without regard to how full an engine is.

- `EvenDeal`: what a co-located trainer does (veRL): the step's groups are cut into as many equal runs as
  there are reserved engines, once, when all of them serve; the engines queue what does not fit.
- `PacedDeal`: what the published code of the paper does (PolyRL, balance.rs and handlers.rs): up to four
  groups a second for the whole fleet, in turn to instances that report an empty queue. A group moves as a
  whole: its unfinished responses continue from the shortest one's length, and what the others had beyond is
  generated again.

Both give a lost instance's responses to whoever serves. An event costs O(log instances): who is free is known
by name (`_Ring`), and groups of which a part still runs are looked at once a second.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlboost_runtime.core.base.timers import Context, Timer
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.responses import Response, StepResponses, WaitingQueue, is_current

PACE_S = 1.0
"""Seconds between two looks at the instances' queues."""
GROUPS_PER_LOOK = 4
"""`max_assigned_batches_per_stats_check` of the published code, for the whole fleet."""


@dataclass(slots=True)
class EvenDeal:
    """Equal runs of groups to all reserved engines at once."""

    instance_table: InstanceTable

    def deal(
        self, queue: WaitingQueue, eligible: Mapping[str, Instance]
    ) -> Iterator[tuple[Response, Instance]]:
        """Yield who gets what; nothing while a reserved engine is still to come."""
        reserved = self.instance_table.reserved.keys()
        if not eligible or len(eligible) < len(reserved) or not eligible.keys() >= reserved:
            return
        names = sorted(eligible)
        waiting = sorted(queue.all(), key=lambda r: r.order)
        queue.clear()
        groups = {group: rank for rank, group in enumerate(dict.fromkeys(r.group for r in waiting))}
        for response in waiting:
            yield response, eligible[names[groups[response.group] * len(names) // len(groups)]]


class PacedDeal:
    """A few groups a second, in turn."""

    def __init__(self, context: Context, eligible: Mapping[str, Instance]) -> None:
        self._context = context
        self._look_at = 0.0
        self._left = 0
        self._free = _Ring(eligible)
        self._parked: list[tuple[int, Response]] = []
        """Out of the queue until the next look, with their assignments so far: siblings still run."""

    def touch(self, name: str) -> None:
        """Take notice that an instance's load or ability may have changed."""
        self._free.touch(name)

    def parked(self) -> list[Response]:
        """Return what waits beside the queue."""
        return [entry[1] for entry in self._parked if is_current(*entry)]

    def forget(self) -> None:
        """Another step: nothing of the former one waits."""
        self._parked.clear()

    def deal(self, queue: WaitingQueue, book: StepResponses) -> Iterator[tuple[Response, Instance]]:
        """Yield who gets what; the rest waits for the next look."""
        if self._context.now >= self._look_at:
            self._look_at = self._context.now + PACE_S
            self._left = GROUPS_PER_LOOK
            for each in self.parked():
                queue.add(each)
            self._parked.clear()
        while self._left and (response := queue.peek()) is not None:
            members = [r for r in book.members_of(response.group) if r.finish_reason is None]
            if any(r.assignment is not None for r in members):
                parked = queue.pop()
                self._parked.append((parked.num_assignments, parked))
                continue
            choice = self._free.next()
            if choice is None:
                break
            self._left -= 1
            kept = min(r.num_tokens for r in members)
            for member in members:
                if member.num_tokens > kept:
                    member.drop_tokens_beyond(kept)
                yield member, choice
        if self._parked or queue.peek() is not None:
            self._context.timers.set(Timer.PACE, "", self._look_at)


class _Ring:
    """The instances that report an empty queue, in turn by name."""

    def __init__(self, eligible: Mapping[str, Instance]) -> None:
        self._eligible = eligible
        self._names: list[str] = []
        self._touched: dict[str, None] = {}
        self._last = ""

    def touch(self, name: str) -> None:
        """Take notice that an instance may have become free, or not free."""
        self._touched[name] = None

    def next(self) -> Instance | None:
        """Return the free instance whose turn it is; None: none is free."""
        for name in self._touched:
            self._file(name)
        self._touched.clear()
        if not self._names:
            return None
        self._last = self._names[bisect_right(self._names, self._last) % len(self._names)]
        return self._eligible[self._last]

    def _file(self, name: str) -> None:
        instance = self._eligible.get(name)
        is_free = (
            instance is not None
            and not instance.num_queued
            and instance.num_assigned < max(1, instance.max_running)
        )
        place = bisect_left(self._names, name)
        is_filed = place < len(self._names) and self._names[place] == name
        if is_free and not is_filed:
            insort(self._names, name)
        elif is_filed and not is_free:
            del self._names[place]
