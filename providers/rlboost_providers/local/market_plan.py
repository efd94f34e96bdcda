"""When a spot market gives a machine and when it takes it away: pure, the same seed gives the same plan.

A market has *nodes*: places for one machine each. A *life* is one machine on one node, numbered from 0 per
node.

- `SeededPlan`: every life of a node lasts a drawn time from the machine's own launch, then the node is absent
  for a drawn time.
- `TracePlan`: nodes come and go at recorded times, counted from the market's first accepted launch.

In both, an exact share of all reclaims is announced, by error diffusion: with 0.2 the 5th, 10th, 15th, ...
(a trace may also say itself what is announced).

Times are in seconds; `started_at`, `launched_at` and results are points on the caller's clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlboost_runtime.job import Market
from rlboost_runtime.traces import Trace, load_trace

SHORTEST_LIFE = 0.3
"""Share of the mean lifetime that every machine gets, so that each has a chance to boot and do some work."""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """The end of a life: the market acts at `at`. `notice_s`: recorded warning time, None where the plan's
    share of announced reclaims decides."""

    at: float
    notice_s: float | None = None


class MarketPlan(Protocol):
    """What the market will do."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Places for a machine, in the order in which they are given away."""

    def reclaim(self, node: str, life: int, launched_at: float, started_at: float) -> Reclaim | None:
        """Return when the machine launched on `node` at `launched_at` is taken away; None: never."""

    def available_from(
        self, node: str, life: int, reclaimed_at: float | None, now: float, started_at: float
    ) -> float | None:
        """Return when `node` can take life number `life`: `now` or earlier means at once; None: never
        again.

        `reclaimed_at`: when its former life was taken by the market; None: it had none, or ended otherwise.
        """

    def notice_s(self, number: int) -> float | None:
        """Return the warning time of the `number`-th reclaim of the market (from 1); None: no warning."""


@dataclass(frozen=True, slots=True)
class _Announced:
    """An exact share of all reclaims is announced."""

    notice_fraction: float
    announced_s: float

    def notice_s(self, number: int) -> float | None:
        """Return the warning time of the `number`-th reclaim, None without warning."""
        return self.announced_s if self._num_announced(number) > self._num_announced(number - 1) else None

    def _num_announced(self, number: int) -> int:
        return math.floor(number * self.notice_fraction + 1e-9)  # 5 * 0.2 must be 1


@dataclass(frozen=True, slots=True)
class SeededPlan(_Announced):
    """Drawn lifetimes and absences: shifted exponential and exponential."""

    nodes: tuple[str, ...]
    seed: int
    mean_lifetime_s: float
    mean_absence_s: float

    def lifetime_s(self, node: str, life: int) -> float:
        """Return how long that machine is left alive; the mean over lives is `mean_lifetime_s`."""
        drawn = self._draw("life", node, life)
        return self.mean_lifetime_s * (SHORTEST_LIFE + (1 - SHORTEST_LIFE) * drawn)

    def absence_s(self, node: str, life: int) -> float:
        """Return how long `node` is away after that life; the mean is `mean_absence_s`."""
        return self.mean_absence_s * self._draw("absence", node, life)

    def reclaim(self, node: str, life: int, launched_at: float, started_at: float) -> Reclaim:
        """Return the end of the life."""
        return Reclaim(launched_at + self.lifetime_s(node, life))

    def available_from(
        self, node: str, life: int, reclaimed_at: float | None, now: float, started_at: float
    ) -> float:
        """Return when the absence after the former life ends; a life that was not reclaimed leaves none."""
        return now if reclaimed_at is None else reclaimed_at + self.absence_s(node, life - 1)

    def _draw(self, what: str, node: str, life: int) -> float:
        # a generator per draw: independent of the order in which lives happen to begin
        return random.Random(f"{self.seed}/{what}/{node}/{life}").expovariate(1.0)  # noqa: S311 a simulation


@dataclass(frozen=True, slots=True)
class Presence:
    """A node is there from `start_s` up to `end_s` (infinite: to the end) after the market's start."""

    start_s: float
    end_s: float
    notice_s: float | None = None


@dataclass(frozen=True, slots=True)
class TracePlan(_Announced):
    """Recorded presences of each node, in order of time."""

    presences: dict[str, tuple[Presence, ...]]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes in the order in which they first came."""
        return tuple(self.presences)

    def reclaim(self, node: str, life: int, launched_at: float, started_at: float) -> Reclaim | None:
        """Return the end of the presence that the launch fell into."""
        for presence in self.presences[node]:
            if launched_at - started_at < presence.end_s:
                if math.isinf(presence.end_s):
                    return None
                return Reclaim(started_at + presence.end_s, presence.notice_s)
        return Reclaim(launched_at)  # launched as it left: taken at once

    def available_from(
        self, node: str, life: int, reclaimed_at: float | None, now: float, started_at: float
    ) -> float | None:
        """Return the start of the node's current or next presence."""
        for presence in self.presences[node]:
            if now - started_at < presence.end_s:
                return started_at + presence.start_s
        return None


def plan_for(market: Market, num_nodes: int, files: Path) -> MarketPlan:
    """Return the plan of a job's `market` for up to `num_nodes` machines; traces lie in `files`. Raises
    `ConfigError` where the trace cannot be used."""
    announced = market.notice_fraction, market.notice_s
    if market.trace is not None:
        return TracePlan(*announced, presences_of(load_trace(files / market.trace)))
    return SeededPlan(
        *announced,
        nodes=tuple(f"node-{k}" for k in range(num_nodes)),
        seed=market.seed,
        mean_lifetime_s=market.mean_lifetime_s,
        mean_absence_s=market.mean_absence_s,
    )


def presences_of(trace: Trace) -> dict[str, tuple[Presence, ...]]:
    """Return when each node of `trace` is there, nodes in the order in which they first came.

    In a trace that announces any reclaim only those are announced; one that announces none leaves it to the
    plan's share.
    """
    unannounced = 0.0 if any(event.kind == "notice" for event in trace.events) else None
    found: dict[str, list[Presence]] = {node: [] for node in trace.nodes}
    since: dict[str, float] = {}
    noticed: dict[str, float] = {}
    for change in trace.events:
        match change.kind:
            case "add":
                since[change.node] = change.at_s
            case "notice":
                noticed[change.node] = change.at_s
            case "remove":
                warned_at = noticed.pop(change.node, None)
                notice_s = unannounced if warned_at is None else change.at_s - warned_at
                found[change.node].append(Presence(since.pop(change.node), change.at_s, notice_s))
    for node, start_s in since.items():
        found[node].append(Presence(start_s, math.inf))
    return {node: tuple(presences) for node, presences in found.items()}
