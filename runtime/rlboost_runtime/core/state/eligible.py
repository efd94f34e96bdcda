"""Which instances may be given work now (`EligibleSet`), and those in order of load (`LoadIndex`).

Guarantees: after `refresh`, `eligible` and the counts of spot instances are what looking at every instance
would give (`check`). An event costs as much as the instances that it changed; a new step or the run's end
looks at all.

Finding the best instance costs O(log instances). An instance whose load or eligibility changed is touched,
which costs O(1); the next lookup updates its entry. An entry whose instance has changed since is void and
dropped when it comes up. Instances of one kind (KV capacity, slots) share a heap: the emptiest of a kind is
the one with the most room in it, so if it does not admit, none of them does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.core.state.instances import Instance, InstanceTable
from rlboost_runtime.core.state.rates import Kind


@dataclass(frozen=True, slots=True)
class Terms:
    """What the eligibility of all instances depends on."""

    version: int | None
    """The open step's policy version; None: no step."""
    newest: int | None
    """The newest one that its responses may be generated under: the same without in-flight updates."""
    reserved_may: bool
    """The reserved engines have the GPUs."""
    is_ending: bool


@dataclass(frozen=True, slots=True)
class Eligibility:
    """What one instance counts as."""

    is_eligible: bool = False
    is_present_spot: bool = False
    """Spot, and serving some version."""
    is_serving_spot: bool = False
    """Spot, connected, and serving a version of the step: eligible except for a pause or a swap."""
    is_live_spot: bool = False
    """Spot, connected, and not about to go; it may still be loading."""


NOTHING = Eligibility()


class EligibleSet:
    """The eligible instances, and counts of spot instances."""

    def __init__(self, instance_table: InstanceTable) -> None:
        self.eligible: dict[str, Instance] = {}
        self.num_present_spot = 0
        self.num_serving_spot = 0
        self.num_live_spot = 0
        self._instance_table = instance_table
        self._terms = Terms(None, None, False, False)
        self._known: dict[str, Eligibility] = {}

    def refresh(self, terms: Terms, changed: dict[str, None]) -> list[str]:
        """Take in changes; return the instances whose eligibility may have changed."""
        former, self._terms = self._terms, terms
        if replace(former, reserved_may=terms.reserved_may) != terms:
            names = list({**self._known, **dict.fromkeys(self._instance_table.instances)})
        elif former.reserved_may != terms.reserved_may:
            names = list({**changed, **dict.fromkeys(self._instance_table.reserved)})
        else:
            names = list(changed)
        for name in names:
            self._update(name)
        return names

    def check(self) -> None:
        """Assert that nothing was missed."""
        for name, instance in self._instance_table.instances.items():
            expected, known = self._assess(instance), self._known.get(name, NOTHING)
            assert known == expected, f"{name} is {expected}, taken for {known}"
            assert (self.eligible.get(name) is instance) == expected.is_eligible, f"{name} is {expected}"
        gone = self._known.keys() - self._instance_table.instances.keys()
        assert not gone, f"{gone} are gone and still counted"
        assert self.eligible.keys() <= self._instance_table.instances.keys(), "gone and still eligible"
        all_known = self._known.values()
        counted = self.num_present_spot, self.num_serving_spot, self.num_live_spot
        real = (
            sum(s.is_present_spot for s in all_known),
            sum(s.is_serving_spot for s in all_known),
            sum(s.is_live_spot for s in all_known),
        )
        assert counted == real, f"counted {counted}, there are {real}"

    def _update(self, name: str) -> None:
        instance = self._instance_table.instances.get(name)
        former = self._known.pop(name, NOTHING)
        now = NOTHING if instance is None else self._assess(instance)
        if instance is not None:
            self._known[name] = now
        self.num_present_spot += now.is_present_spot - former.is_present_spot
        self.num_serving_spot += now.is_serving_spot - former.is_serving_spot
        self.num_live_spot += now.is_live_spot - former.is_live_spot
        if instance is not None and now.is_eligible:
            self.eligible[name] = instance
        else:
            self.eligible.pop(name, None)

    def _assess(self, instance: Instance) -> Eligibility:
        terms = self._terms
        is_spot = instance.pool is Pool.SPOT
        oldest, newest = terms.version, terms.newest
        serves = oldest is not None and newest is not None and instance.can_serve(oldest, newest)
        return Eligibility(
            is_eligible=serves
            and not terms.is_ending
            and not (instance.is_paused or instance.is_swapping)
            and (is_spot or terms.reserved_may),
            is_present_spot=is_spot and instance.is_present,
            is_serving_spot=is_spot and serves,
            is_live_spot=is_spot and instance.is_connected and not instance.is_draining,
        )


Rank = tuple[float, float, str]
"""Smaller is better; ends with the name, so that no two are equal."""
_Alike = tuple[Kind, int | None]
"""Kind and policy version."""
VOID_SHARE = 4
"""A heap is rebuilt when it has this many entries per eligible instance."""
VOID_SLACK = 64
"""Entries that are always allowed."""


class LoadIndex:
    """The eligible instances by `rank`, which is None for one that is not to be found.

    `eligible` is read, never changed.
    """

    def __init__(self, eligible: Mapping[str, Instance], rank: Callable[[Instance], Rank | None]) -> None:
        self._eligible = eligible
        self._rank = rank
        self._heaps: dict[_Alike, list[Rank]] = {}
        self._touched: dict[str, None] = {}

    def touch(self, name: str) -> None:
        """Note that an instance's load or eligibility may have changed."""
        self._touched[name] = None

    def best(
        self, admits: Callable[[Instance], bool], avoid: Collection[str] = frozenset[str]()
    ) -> Instance | None:
        """Return the best instance that admits and is not to be avoided; None if there is none.

        `admits` must refuse every instance of a kind and a version if it refuses the best of them.
        """
        self._update_touched()
        found: tuple[Rank, Instance] | None = None
        for alike, heap in list(self._heaps.items()):
            top = self._top(alike, heap, avoid)
            if not heap:
                del self._heaps[alike]
            if top is not None and admits(top[1]) and (found is None or top[0] < found[0]):
                found = top
        return None if found is None else found[1]

    def _top(self, alike: _Alike, heap: list[Rank], avoid: Collection[str]) -> tuple[Rank, Instance] | None:
        avoided: list[Rank] = []
        found = None
        while heap and found is None:
            rank = heap[0]
            instance = self._eligible.get(rank[2])
            if instance is None or _alike(instance) != alike or self._rank(instance) != rank:
                heapq.heappop(heap)
            elif rank[2] in avoid:
                avoided.append(heapq.heappop(heap))
            else:
                found = rank, instance
        for rank in avoided:
            heapq.heappush(heap, rank)
        return found

    def _update_touched(self) -> None:
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        for name in touched:
            instance = self._eligible.get(name)
            rank = None if instance is None else self._rank(instance)
            if instance is None or rank is None:
                continue
            alike = _alike(instance)
            heap = self._heaps.setdefault(alike, [])
            heapq.heappush(heap, rank)
            if len(heap) > VOID_SHARE * len(self._eligible) + VOID_SLACK:
                self._rebuild(alike)

    def _rebuild(self, alike: _Alike) -> None:
        members = (i for i in self._eligible.values() if _alike(i) == alike)
        heap = [rank for i in members if (rank := self._rank(i)) is not None]
        heapq.heapify(heap)
        self._heaps[alike] = heap


def _alike(instance: Instance) -> _Alike:
    return instance.kind, instance.version
