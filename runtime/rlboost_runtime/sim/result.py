"""What a simulated run returns, as rows, intervals and series. All of it is simulated, nothing measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Activity = Literal[
    "boot", "pull", "rollout", "idle", "seed", "hand-over", "train", "wait", "optimizer", "publish", "restart"
]
"""What a machine does. Spot machines: boot, pull (and load) weights, rollout, idle. The reserved node: seed
(its own engines roll out), hand-over (either way), train, wait (for responses), optimizer, publish, restart
(of the trainer)."""

RESERVED = "reserved"
"""The reserved node's name in intervals; spot machines are called as the core calls them."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One finished step. Times in seconds since the window's begin, lengths in seconds."""

    step: int
    started_s: float
    seconds: float
    tokens: int
    """Response tokens of the step: generated and trained."""
    t_seed_s: float
    """Length of the seeding window that the policy had planned."""
    seeded_s: float
    """How long the reserved engines really rolled out, all windows of the step together."""
    wait_s: float
    """The trainer's idle time for want of responses."""
    train_s: float
    """The trainer's time in micro-batches."""
    spot_instances: float
    """Time average of spot instances that held a usable version."""
    useful_instances: int
    """Spot instances that the policy thought worth having after the step."""
    longest_tokens: int
    """Tokens of the longest response."""
    usd: float
    migrations: int
    tokens_redone: int
    """Tokens generated again because an instance was lost."""


@dataclass(frozen=True, slots=True)
class Interval:
    """One machine doing one thing; for a Gantt chart. Seconds since the window's begin."""

    machine: str
    start_s: float
    end_s: float
    what: Activity


@dataclass(frozen=True, slots=True)
class Kill:
    """A spot machine taken away while it was ours, or ended because that was announced."""

    at_s: float
    machine: str
    node: str
    """The trace's node that it ran on."""
    was_noticed: bool


@dataclass(frozen=True, slots=True)
class SimResult:
    """One policy over one window.

    Rates and costs are over the time from the window's begin to the end of its last whole step.
    """

    preset: str
    trace: str
    policy: str
    seed: int
    hours: float
    tokens_per_s: float
    """Response tokens generated and trained, per second."""
    usd_per_hour: float
    tokens_per_usd: float
    steps: int
    """Whole steps finished."""
    preemptions: int = 0
    tokens_lost: int = 0
    """Tokens that were generated, lost with a machine, and had to be generated again."""
    mean_spot_machines: float = 0.0
    """Time average of billed spot machines."""
    rows: tuple[StepRow, ...] = ()
    timeline: tuple[Interval, ...] = ()
    throughput: tuple[tuple[float, float], ...] = ()
    """(seconds, response tokens generated per second) at regular times: the mean since the time before."""
    kills: tuple[Kill, ...] = ()
    events: int = 0
    """Events that the core handled."""
    commands_digest: str = ""
    """Digest of all commands of the core, in order: the same seed gives the same digest."""
    bill: dict[str, float] = field(default_factory=dict)
    """Dollars until the last whole step's end: `start-up` (all before the first step), `spot` machines,
    `egress`; and `spot hours`."""
    overheads_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the reserved node in hand-over, and of spot instances in prefills that repeat work, by
    name."""

    @property
    def seconds(self) -> float:
        """From the window's begin to the end of the last whole step."""
        return self.rows[-1].started_s + self.rows[-1].seconds

    @property
    def tokens(self) -> int:
        """Response tokens of all whole steps."""
        return sum(row.tokens for row in self.rows)


def summed_up(
    preset: str, trace: str, policy: str, seed: int, hours: float, rows: Sequence[StepRow]
) -> SimResult:
    """Return the result that follows from the steps alone."""
    seconds = rows[-1].started_s + rows[-1].seconds
    tokens, usd = sum(row.tokens for row in rows), sum(row.usd for row in rows)
    return SimResult(
        preset=preset,
        trace=trace,
        policy=policy,
        seed=seed,
        hours=hours,
        tokens_per_s=tokens / seconds,
        usd_per_hour=3600.0 * usd / seconds,
        tokens_per_usd=tokens / usd if usd else 0.0,
        steps=len(rows),
        rows=tuple(rows),
    )


BIN_S = 60.0
"""Seconds of one point of the throughput series."""


@dataclass(slots=True)
class Recorder:
    """Collects while the run goes on."""

    rows: list[StepRow] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    seconds: dict[Activity, float] = field(default_factory=dict)
    """Seconds of the reserved node by activity."""
    _current: dict[str, tuple[float, Activity]] = field(default_factory=dict)
    _generated: list[int] = field(default_factory=list)

    def begin(self, machine: str, what: Activity, at: float) -> None:
        """A machine begins an activity at `at`."""
        known = self._current.get(machine)
        if known is not None and known[1] == what:
            return
        self.stop(machine, at)
        self._current[machine] = at, what

    def stop(self, machine: str, at: float) -> None:
        """A machine is gone."""
        known = self._current.pop(machine, None)
        if known is None:
            return
        start, what = known
        if at > start:
            self.intervals.append(Interval(machine, start, at, what))
        if machine == RESERVED:
            self.seconds[what] = self.seconds.get(what, 0.0) + at - start

    def reserved_s(self, what: Activity, at: float) -> float:
        """Return the reserved node's seconds with something until `at`."""
        start, activity = self._current.get(RESERVED, (at, what))
        return self.seconds.get(what, 0.0) + (at - start if activity == what else 0.0)

    def generated(self, tokens: int, at: float) -> None:
        """Engines have generated more tokens."""
        index = int(at / BIN_S)
        while len(self._generated) <= index:
            self._generated.append(0)
        self._generated[index] += tokens

    def close(self, at: float) -> None:
        """The run is over."""
        for machine in list(self._current):
            self.stop(machine, at)

    def throughput(self) -> tuple[tuple[float, float], ...]:
        """Return (end of the bin, tokens per second)."""
        return tuple(((i + 1) * BIN_S, tokens / BIN_S) for i, tokens in enumerate(self._generated))
