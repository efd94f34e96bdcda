"""What a trace looks like in a few numbers: how many nodes, how long they last, how they are taken.

The numbers are those by which generated markets are matched to recorded ones (`generate`). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from rlboost_runtime.traces.events import Trace, TraceEvent


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Times in seconds, rates per hour; None where a trace has too few events to say.

    A *tick* is a moment at which something is taken; a *mass reclaim* is a tick that takes two or more.
    """

    hours: float
    zones: int
    nodes: int
    """Distinct nodes."""
    adds: int
    """Adds, with those at the start."""
    removes: int
    notices: int
    mean_capacity: float
    """Over time."""
    min_capacity: int
    max_capacity: int
    median_lifetime_s: float | None
    """Of lives that ended within the trace."""
    mean_lifetime_s: float | None
    """Node time divided by removals: lives that go on count too."""
    remove_ticks_per_hour: float
    """Arrivals of reclaims."""
    mean_gap_s: float | None
    """From one reclaim tick to the next."""
    mean_removes_per_tick: float | None
    max_removes_per_tick: int
    mass_share: float | None
    """Share of all removals that come in mass reclaims."""
    mean_adds_per_tick: float | None
    """After the start."""


def trace_statistics(trace: Trace) -> TraceStatistics:
    """Return the statistics of `trace`."""
    ticks = Counter(event.at_s for event in trace.events if event.kind == "remove")
    arrivals = Counter(event.at_s for event in trace.events if event.kind == "add" and event.at_s > 0)
    lives = _ended_lives(trace.events)
    node_s, hours = _node_seconds(trace), trace.duration_s / 3600
    counts = [count for _, count in trace.capacity_steps]
    removes = ticks.total()
    return TraceStatistics(
        hours=hours,
        zones=len({event.zone for event in trace.events if event.zone}),
        nodes=len(trace.nodes),
        adds=sum(event.kind == "add" for event in trace.events),
        removes=removes,
        notices=sum(event.kind == "notice" for event in trace.events),
        mean_capacity=node_s / trace.duration_s,
        min_capacity=min(counts),
        max_capacity=max(counts),
        median_lifetime_s=median(lives) if lives else None,
        mean_lifetime_s=node_s / removes if removes else None,
        remove_ticks_per_hour=len(ticks) / hours,
        mean_gap_s=_mean([b - a for a, b in pairwise(sorted(ticks))]),
        mean_removes_per_tick=_mean(list(ticks.values())),
        max_removes_per_tick=max(ticks.values(), default=0),
        mass_share=sum(n for n in ticks.values() if n > 1) / removes if removes else None,
        mean_adds_per_tick=_mean(list(arrivals.values())),
    )


def _ended_lives(events: Sequence[TraceEvent]) -> list[float]:
    since: dict[str, float] = {}
    lives = []
    for event in events:
        if event.kind == "add":
            since[event.node] = event.at_s
        elif event.kind == "remove":
            lives.append(event.at_s - since.pop(event.node))
    return lives


def _node_seconds(trace: Trace) -> float:
    steps = [*trace.capacity_steps, (trace.duration_s, 0)]
    return sum(count * (until_s - from_s) for (from_s, count), (until_s, _) in pairwise(steps))


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
