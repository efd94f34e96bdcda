"""A spot trace: which nodes a cloud gave and took back, and when.

Guarantees of every `Trace`: times never go back and lie in `[0, duration_s]`; a node comes before it is
noticed or leaves, and is there once at a time. Pure: a window and a sample of a trace are traces again.

What a trace looks like in a few numbers: how many nodes, how long they last, how they are taken.

The numbers are those by which generated markets are matched to recorded ones (`generate`). Pure.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Literal

Kind = Literal["add", "notice", "remove"]
"""add: the node can be had; notice: the cloud announces that it takes it; remove: it is gone."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that happened to one node, `at_s` seconds after the trace's start."""

    at_s: float
    node: str
    kind: Kind
    zone: str = ""


@dataclass(frozen=True)
class Trace:
    """A recorded or generated market; `source` has which of the two, and where it is from.

    A node that comes back may have its former name. Raises `ValueError` for events that cannot have happened.
    """

    name: str
    source: str
    events: tuple[TraceEvent, ...]
    duration_s: float

    def __post_init__(self) -> None:
        _check(self.events, self.duration_s)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Every node, in the order in which they first came."""
        return tuple(dict.fromkeys(event.node for event in self.events))

    @cached_property
    def capacity_steps(self) -> tuple[tuple[float, int], ...]:
        """The number of nodes as a step curve: `(from_s, nodes)`, beginning at 0, one entry per tick."""
        steps, count = [(0.0, 0)], 0
        for at_s, tick in groupby(self.events, key=lambda event: event.at_s):
            count += sum({"add": 1, "notice": 0, "remove": -1}[event.kind] for event in tick)
            if at_s == 0.0:
                steps[0] = (0.0, count)
            elif count != steps[-1][1]:
                steps.append((at_s, count))
        return tuple(steps)

    def window(self, start_s: float, end_s: float) -> Trace:
        """Return what happens in `[start_s, end_s)`, counted from `start_s`.

        Nodes that are there at `start_s` are added at 0 and, where their notice is out already, noticed at 0.
        Raises `ValueError` where the window is empty or leaves the trace.
        """
        if not 0 <= start_s < end_s <= self.duration_s:
            raise ValueError(f"no window {start_s:g}:{end_s:g} s in a trace of 0:{self.duration_s:g} s")
        before = [event for event in self.events if event.at_s <= start_s]
        during = [event for event in self.events if start_s < event.at_s < end_s]
        shifted = (replace(event, at_s=event.at_s - start_s) for event in during)
        return replace(self, events=(*_standing(before), *shifted), duration_s=end_s - start_s)


def sample_nodes(trace: Trace, fraction: float, seed: int) -> Trace:
    """Return `trace` with a drawn share of its nodes, each with its own events.

    The protocol of the RLBoost paper (arXiv 2510.19225, evaluation set-up), with 50 % there. Exactly
    `round(fraction * nodes)` are kept; the same seed keeps the same ones. `fraction` is in `[0, 1]`.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a share of nodes lies between 0 and 1, not {fraction:g}")
    drawn = random.Random(f"nodes/{seed}")  # noqa: S311 a simulation
    kept = set(drawn.sample(trace.nodes, round(fraction * len(trace.nodes))))
    return replace(trace, events=tuple(event for event in trace.events if event.node in kept))


def _standing(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the adds and notices, at 0, of the nodes that `events` leave behind."""
    there: dict[str, list[TraceEvent]] = {}
    for event in events:
        if event.kind == "remove":
            del there[event.node]
        else:
            there.setdefault(event.node, []).append(replace(event, at_s=0.0))
    return [event for kept in there.values() for event in kept]


def _check(events: tuple[TraceEvent, ...], duration_s: float) -> None:
    there: dict[str, bool] = {}  # node -> its notice is out
    last_s = 0.0
    for event in events:
        if not last_s <= event.at_s <= duration_s:
            raise ValueError(f"{event} lies outside {last_s:g}:{duration_s:g} s")
        last_s = event.at_s
        if (event.kind == "add") == (event.node in there):
            raise ValueError(
                f"{event}: the node is {'there already' if event.node in there else 'not there'}"
            )
        if event.kind == "notice" and there[event.node]:
            raise ValueError(f"{event}: noticed twice")
        if event.kind == "remove":
            del there[event.node]
        else:
            there[event.node] = event.kind == "notice"
    if not 0 < duration_s < math.inf:
        raise ValueError(f"a trace lasts some time, not {duration_s:g} s")


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Times in seconds, rates per hour; None where a trace has too few events.

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
