"""Seeded spot markets that look like recorded ones: `generate_trace(PROFILES["generated-p3"], seed)`.

A market has a target that it refills and zones from which it takes:

- *Reclaims* arrive as a Poisson process. One takes several nodes of one zone at once; how many is drawn from
  the recorded sizes. Which ones is drawn too, young ones more often where `youth` is above 0: recorded
  lifetimes have many short lives and a long tail (median over mean below the exponential's 0.69).
- *Refills* arrive as a Poisson process whose rate grows with the number of missing nodes; sizes as recorded.

So inter-arrival times, sizes, lifetimes, capacity and its bounds follow from the profile; a test compares
their means over seeds with the recorded ones: within 6 % for p3, 15 % for a100. What is not modelled: hours
of the day, and a target that changes.

Generated traces are marked so in `source`. The same profile, seed and length give the same trace again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlboost_runtime.traces.events import Trace, TraceEvent


@dataclass(frozen=True, slots=True)
class MarketProfile:
    """A market, matched to a recorded one."""

    name: str
    recorded_from: str
    """Where the recorded trace is from."""
    hours: float
    """Length of the recorded trace."""
    tick_s: float
    """Everything happens at multiples of it."""
    zones: tuple[str, ...]
    target: int
    """Most nodes at once: what the market is asked for."""
    at_start: int
    reclaims_per_hour: float
    reclaim_sizes: Mapping[int, int]
    """How often a tick took so many nodes, as recorded."""
    refills_per_hour_and_missing_node: float
    refill_sizes: Mapping[int, int]
    """How often a tick brought so many nodes, as recorded."""
    recorded: Mapping[str, float]
    """Fields of `TraceStatistics` as measured on the recorded trace."""
    youth: float = 0.0
    """A node of age a is taken with weight a ** -youth."""


# Sizes and `recorded` were measured by `trace_statistics` on the public files bamboo-p3 and gcp-a100 of
# `known` (MIT, repository uclasystem/bamboo). `youth` and the refills' rate are fitted so that median
# lifetime and mean capacity agree. The p3 file names no zones: three, one of them hit at a time, are assumed.
# A file of counts does not know the lifetimes of nodes, so those of a100 are not matched.
PROFILES: Mapping[str, MarketProfile] = {
    profile.name: profile
    for profile in (
        MarketProfile(
            name="generated-p3",
            recorded_from="AWS p3 nodes recorded for Bamboo (arXiv 2204.12013)",
            hours=11.37,
            tick_s=60.0,
            zones=("zone-a", "zone-b", "zone-c"),
            target=32,
            at_start=18,
            reclaims_per_hour=7.1,
            reclaim_sizes={1: 39, 2: 13, 3: 15, 4: 7, 5: 1, 6: 4},
            refills_per_hour_and_missing_node=0.98,
            refill_sizes={1: 49, 2: 15, 3: 8, 4: 6, 5: 1, 6: 2, 7: 1, 8: 1},
            youth=0.12,
            recorded={
                "removes": 167,
                "mean_capacity": 24.03,
                "max_capacity": 32,
                "median_lifetime_s": 3540.0,
                "mean_lifetime_s": 5887.5,
                "remove_ticks_per_hour": 6.95,
                "mean_gap_s": 498.5,
                "mean_removes_per_tick": 2.114,
                "max_removes_per_tick": 6,
                "mass_share": 0.766,
                "mean_adds_per_tick": 1.916,
            },
        ),
        MarketProfile(
            name="generated-a100",
            recorded_from="GCP a2-highgpu-1g nodes of us-east1-b recorded for Bamboo (arXiv 2204.12013)",
            hours=27.02,
            tick_s=100.0,
            zones=("us-east1-b",),
            target=64,
            at_start=55,
            reclaims_per_hour=1.33,
            reclaim_sizes={1: 14, 2: 5, 3: 2, 4: 3, 5: 4, 6: 3, 8: 2, 10: 1, 12: 1, 36: 1},
            refills_per_hour_and_missing_node=0.20,
            refill_sizes={1: 11, 2: 5, 3: 4, 4: 5, 5: 5, 6: 2, 10: 4, 12: 1, 21: 1},
            recorded={
                "removes": 154,
                "mean_capacity": 57.3,
                "max_capacity": 64,
                "remove_ticks_per_hour": 1.332,
                "mean_removes_per_tick": 4.278,
                "mass_share": 0.909,
                "mean_adds_per_tick": 4.289,
            },
        ),
    )
}


def generate_trace(profile: MarketProfile, seed: int, hours: float | None = None) -> Trace:
    """Return a market of `hours` (the recorded length where not given) like `profile`."""
    length_h = profile.hours if hours is None else hours
    if not 0 < length_h <= 24 * 366:
        raise ValueError(f"a generated trace lasts up to a year, not {length_h:g} h")
    market = _Market(profile, random.Random(f"{profile.name}/{seed}"))  # noqa: S311 a simulation
    for tick in range(int(length_h * 3600 / profile.tick_s) + 1):
        market.turn(tick * profile.tick_s)
    return Trace(
        name=profile.name,
        source=f"generated, seed {seed}, matched to {profile.recorded_from}",
        events=tuple(market.events),
        duration_s=length_h * 3600,
    )


@dataclass(slots=True)
class _Market:
    profile: MarketProfile
    drawn: random.Random
    events: list[TraceEvent] = field(default_factory=list)
    there: dict[str, TraceEvent] = field(default_factory=dict)
    """Nodes that are there, by name, with their add."""
    num_named: int = 0

    def turn(self, at_s: float) -> None:
        """Let everything happen that happens at `at_s`."""
        if at_s == 0:
            self._add(at_s, self.profile.at_start)
            return
        if self._happens(self.profile.reclaims_per_hour):
            self._reclaim(at_s)
        missing = self.profile.target - len(self.there)
        if self._happens(self.profile.refills_per_hour_and_missing_node * missing):
            self._add(at_s, min(missing, self._size(self.profile.refill_sizes)))

    def _happens(self, per_hour: float) -> bool:
        return self.drawn.random() < per_hour * self.profile.tick_s / 3600

    def _size(self, sizes: Mapping[int, int]) -> int:
        return self.drawn.choices(list(sizes), weights=list(sizes.values()))[0]

    def _add(self, at_s: float, number: int) -> None:
        for _ in range(number):
            self.num_named += 1
            event = TraceEvent(at_s, f"node{self.num_named}", "add", self.drawn.choice(self.profile.zones))
            self.there[event.node] = event
            self.events.append(event)

    def _reclaim(self, at_s: float) -> None:
        """Take nodes of one zone: one that holds a node, nodes counting equally."""
        if not self.there:
            return
        zone = self.drawn.choice(list(self.there.values())).zone
        nodes = [event for event in self.there.values() if event.zone == zone]
        for _ in range(min(len(nodes), self._size(self.profile.reclaim_sizes))):
            ages = [at_s - event.at_s for event in nodes]
            weights = [max(age, self.profile.tick_s) ** -self.profile.youth for age in ages]
            taken = nodes.pop(self.drawn.choices(range(len(nodes)), weights)[0])
            del self.there[taken.node]
            self.events.append(TraceEvent(at_s, taken.node, "remove", zone))
