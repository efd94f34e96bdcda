"""A spot trace: which nodes a cloud gave and took back, and when.

Guarantees of every `Trace`: times never go back and lie in `[0, duration_s]`; a node comes before it is
noticed or leaves, and is there once at a time. Pure: a window and a sample of a trace are traces again.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

Kind = Literal["add", "notice", "remove"]
"""add: the node can be had; notice: the cloud says that it will take it; remove: it is gone."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that happened to one node, `at_s` seconds after the trace's start."""

    at_s: float
    node: str
    kind: Kind
    zone: str = ""


@dataclass(frozen=True)
class Trace:
    """A recorded or generated market; `source` says which of the two, and where it is from.

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

    def capacity_at(self, at_s: float) -> int:
        """Return the number of nodes that are there once everything at `at_s` has happened."""
        index = bisect_right(self.capacity_steps, at_s, key=lambda step: step[0])
        return self.capacity_steps[index - 1][1] if index else 0

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
    there: dict[str, bool] = {}  # whether its notice is out
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
