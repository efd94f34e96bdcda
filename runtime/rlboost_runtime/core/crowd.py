"""Able instances in order of load, kept up to date as they change: finding the best costs O(log instances).

An instance whose load or ability changed is touched, which costs O(1); the next look files it anew. An
entry whose instance has changed since is void and dropped when it comes up. Instances of one kind (KV
capacity, slots) share a heap: the emptiest of a kind is the one with the most room in it, so if it does not
admit, none of them does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping

from rlboost_runtime.core.instances import Instance

Rank = tuple[float, float, str]
"""Smaller is better; ends with the name, so that no two are equal."""
VOID_SHARE = 4
"""A heap is built anew when it has this many entries per able instance."""
VOID_SLACK = 64
"""Entries that are always allowed."""


class Crowd:
    """The able instances by `rank`; None: not to be found. `able` is read, never changed."""

    def __init__(self, able: Mapping[str, Instance], rank: Callable[[Instance], Rank | None]) -> None:
        self._able = able
        self._rank = rank
        self._heaps: dict[tuple[int, int], list[Rank]] = {}
        self._touched: dict[str, None] = {}

    def touch(self, name: str) -> None:
        """Take notice that an instance's load or ability may have changed."""
        self._touched[name] = None

    def best(
        self, admits: Callable[[Instance], bool], avoid: Collection[str] = frozenset[str]()
    ) -> Instance | None:
        """Return the best instance that admits and is not to be avoided; None if there is none.

        `admits` must say no to every instance of a kind once it does to the best of that kind.
        """
        self._file_touched()
        found: tuple[Rank, Instance] | None = None
        for heap in self._heaps.values():
            top = self._top(heap, avoid)
            if top is not None and admits(top[1]) and (found is None or top[0] < found[0]):
                found = top
        return None if found is None else found[1]

    def _top(self, heap: list[Rank], avoid: Collection[str]) -> tuple[Rank, Instance] | None:
        avoided: list[Rank] = []
        found = None
        while heap and found is None:
            rank = heap[0]
            instance = self._able.get(rank[2])
            if instance is None or self._rank(instance) != rank:
                heapq.heappop(heap)
            elif rank[2] in avoid:
                avoided.append(heapq.heappop(heap))
            else:
                found = rank, instance
        for rank in avoided:
            heapq.heappush(heap, rank)
        return found

    def _file_touched(self) -> None:
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        for name in touched:
            instance = self._able.get(name)
            rank = None if instance is None else self._rank(instance)
            if instance is None or rank is None:
                continue
            kind = instance.kv_tokens, instance.max_running
            heap = self._heaps.setdefault(kind, [])
            heapq.heappush(heap, rank)
            if len(heap) > VOID_SHARE * len(self._able) + VOID_SLACK:
                self._rebuild(kind)

    def _rebuild(self, kind: tuple[int, int]) -> None:
        members = (i for i in self._able.values() if (i.kv_tokens, i.max_running) == kind)
        heap = [rank for i in members if (rank := self._rank(i)) is not None]
        heapq.heapify(heap)
        self._heaps[kind] = heap
