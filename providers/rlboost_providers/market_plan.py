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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Market

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
        """Return when `node` can take life number `life`: `now` or earlier means at once; None: never again.

        `reclaimed_at`: when its former life was taken by the market; None: it had none, or ended otherwise.
        """

    def notice_s(self, number: int) -> float | None:
        """Return the warning time of the `number`-th reclaim of the market (from 1); None: no warning."""


@dataclass(frozen=True, slots=True)
class _Announcements:
    """An exact share of all reclaims."""

    fraction: float
    seconds: float

    def notice_s(self, number: int) -> float | None:
        """Return the warning time of the `number`-th reclaim, None without warning."""
        return self.seconds if self._num_announced(number) > self._num_announced(number - 1) else None

    def _num_announced(self, number: int) -> int:
        return math.floor(number * self.fraction + 1e-9)  # 5 * 0.2 must be 1


@dataclass(frozen=True, slots=True)
class SeededPlan:
    """Drawn lifetimes and absences: shifted exponential and exponential."""

    nodes: tuple[str, ...]
    seed: int
    mean_lifetime_s: float
    mean_absence_s: float
    announcements: _Announcements

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

    def notice_s(self, number: int) -> float | None:
        """Return the warning time of the `number`-th reclaim."""
        return self.announcements.notice_s(number)

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
class TracePlan:
    """Recorded presences of each node, in order of time."""

    presences: dict[str, tuple[Presence, ...]]
    announcements: _Announcements

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

    def notice_s(self, number: int) -> float | None:
        """Return the warning time of the `number`-th reclaim."""
        return self.announcements.notice_s(number)


def plan_for(market: Market, num_nodes: int, files: Path) -> MarketPlan:
    """Return the plan of a job's `market` for up to `num_nodes` machines; traces lie in `files`.

    Raises `ConfigError` where the trace cannot be used.
    """
    announcements = _Announcements(market.notice_fraction, market.notice_s)
    if market.trace is not None:
        return TracePlan(read_trace(files / market.trace), announcements)
    return SeededPlan(
        nodes=tuple(f"node-{k}" for k in range(num_nodes)),
        seed=market.seed,
        mean_lifetime_s=market.mean_lifetime_s,
        mean_absence_s=market.mean_absence_s,
        announcements=announcements,
    )


# --- trace files -----------------------------------------------------------------------------------------


def read_trace(path: Path) -> dict[str, tuple[Presence, ...]]:
    """Return the presences in a file of `time_ms,add|remove,node[,notice_s]` rows.

    Time 0 is the first row. Blank lines and lines that start with # are skipped. A fourth column is allowed
    in removals: the warning time, 0 for none. Raises `ConfigError` naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{path}: cannot be read: {exc}", "give a text file of time_ms,add|remove,node rows"
        ) from exc
    reader = _TraceReader(path)
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            reader.read(number, line)
    if reader.origin_ms is None:
        raise ConfigError(f"{path}: no rows", "give rows such as `0,add,node1`, or use a seed instead")
    return reader.presences()


@dataclass(slots=True)
class _TraceReader:
    """Reads rows in order and refuses what cannot have happened."""

    path: Path
    origin_ms: int | None = None
    last_ms: int = 0
    since: dict[str, float] = field(default_factory=dict)  # nodes that are there now
    found: dict[str, list[Presence]] = field(default_factory=dict)

    def read(self, number: int, line: str) -> None:
        columns = [column.strip() for column in line.split(",")]
        if len(columns) not in (3, 4) or not columns[2]:
            raise self._error(number, f"found `{line.strip()}`", "write time_ms,add|remove,node")
        at_s = self._time(number, columns[0])
        action, node = columns[1:3]
        if action == "add":
            self._add(number, at_s, node, columns[3:])
        elif action == "remove":
            self._remove(number, at_s, node, columns[3:])
        else:
            raise self._error(number, f"unknown action `{action}`", "write add or remove")

    def presences(self) -> dict[str, tuple[Presence, ...]]:
        still = {node: [Presence(start, math.inf)] for node, start in self.since.items()}
        return {node: (*ended, *still.get(node, [])) for node, ended in self.found.items()}

    def _time(self, number: int, text: str) -> float:
        if not (text.isascii() and text.isdigit()):
            raise self._error(number, f"time `{text}`", "write whole milliseconds, 0 or more")
        at_ms = int(text)
        if self.origin_ms is None:
            self.origin_ms = at_ms
        elif at_ms < self.last_ms:
            raise self._error(
                number, f"time goes back from {self.last_ms} to {at_ms} ms", "sort the rows by time"
            )
        self.last_ms = at_ms
        return (at_ms - self.origin_ms) / 1000

    def _add(self, number: int, at_s: float, node: str, rest: list[str]) -> None:
        if node in self.since:
            raise self._error(
                number, f"`{node}` is added but is there already", "remove the row, or its removal is missing"
            )
        if rest:
            raise self._error(
                number, "a notice in a row that adds", "give the fourth column in remove rows only"
            )
        self.since[node] = at_s
        self.found.setdefault(node, [])

    def _remove(self, number: int, at_s: float, node: str, rest: list[str]) -> None:
        if node not in self.since:
            never = "never came" if node not in self.found else "is not there at that time"
            raise self._error(
                number, f"`{node}` is removed but {never}", "add it in an earlier row, or delete this one"
            )
        notice_s = self._notice(number, rest[0]) if rest else None
        self.found[node].append(Presence(self.since.pop(node), at_s, notice_s))

    def _notice(self, number: int, text: str) -> float:
        try:
            notice_s = float(text)
        except ValueError:
            notice_s = -1.0
        if not 0 <= notice_s < math.inf:
            raise self._error(number, f"notice `{text}`", "write seconds, 0 for no notice")
        return notice_s

    def _error(self, number: int, found: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self.path}:{number}: {found}", remedy)
