"""What the parts of a core share (`Context`): the time, the tunables, deadlines, counters and the commands of
this event.

Deadlines are named by a kind and a subject. Setting, moving and cancelling one costs O(log n) at worst;
moving it later, which every heartbeat does, costs O(1), as its place in the heap is corrected when it comes
up. `earliest` is always exact, so no tick is wasted on a deadline that moved.

Counters are over a run, for status and tests; nothing is decided on them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rlboost_runtime.core.base.messages import Command, CoreConfig, LossCause


class Timer(StrEnum):
    """What a deadline is for. The subject is an instance, a machine or the empty string."""

    LEASE = "lease"
    """An instance's lease ends without a heartbeat."""
    GRACE = "grace"
    """A disconnected instance does not come back."""
    HANG = "hang"
    """An engine with work makes no progress."""
    ANSWER = "answer"
    """An instance does not answer an Abort or a Sleep."""
    RELOAD = "reload"
    """Load again after a refusal."""
    PAUSE = "pause"
    """An instance whose engine failed may be tried again."""
    BOOT = "boot"
    """A machine's agents should have dialled in."""
    NOTICE = "notice"
    """A noticed machine should be gone."""
    REJOIN = "rejoin"
    """An agent of a machine without instances should have dialled in again."""
    TERMINATE = "terminate"
    """Ask again to end a machine."""
    LAUNCH = "launch"
    """The pause after a failed launch is over."""
    WINDOW = "window"
    """The seeding window has lasted T_seed."""
    RECALL = "recall"
    """Work is left and no instance serves it: recall the GPU."""
    BALANCE = "balance"
    """Responses may be moved between instances again."""
    SCALE = "scale"
    """A fleet that only serves looks at its load again."""
    PACE = "pace"
    """Responses that wait on purpose may be placed."""


INSTANCE_TIMERS = (Timer.LEASE, Timer.GRACE, Timer.HANG, Timer.ANSWER, Timer.RELOAD, Timer.PAUSE)
MACHINE_TIMERS = (Timer.BOOT, Timer.REJOIN, Timer.NOTICE, Timer.TERMINATE)

Key = tuple[Timer, str]


class Timers:
    """All deadlines of a core, in seconds of the run."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._planned: dict[Key, float] = {}  # where the key stands in the heap; never later than due
        # Ties are broken by the key: the order must not depend on when `earliest` was called.
        self._heap: list[tuple[float, Key]] = []

    def set(self, timer: Timer, subject: str, at: float) -> None:
        """Set or move a deadline."""
        key = (timer, subject)
        self._due[key] = at
        planned = self._planned.get(key)
        if planned is None or at < planned:
            self._push(key, at)

    def cancel(self, timer: Timer, subject: str) -> None:
        """Forget a deadline; one that is not set is fine."""
        self._due.pop((timer, subject), None)

    def cancel_all(self, timers: Iterable[Timer], subject: str) -> None:
        """Forget these deadlines of a subject."""
        for timer in timers:
            self.cancel(timer, subject)

    def due(self, timer: Timer, subject: str) -> float | None:
        """Return the deadline, None where it is not set."""
        return self._due.get((timer, subject))

    def earliest(self) -> float | None:
        """Return the earliest deadline."""
        while self._heap:
            at, key = self._heap[0]
            due = self._due.get(key)
            if self._planned.get(key) == at and due == at:
                return at
            heapq.heappop(self._heap)
            if self._planned.get(key) != at:
                continue  # superseded by an earlier entry that has come up already
            del self._planned[key]
            if due is not None:
                self._push(key, due)
        return None

    def pop_due(self, now: float) -> Iterator[Key]:
        """Yield and forget every deadline up to `now`, earliest first, equal ones by key.

        What the consumer sets waits for the next round, so that a round always ends; what it cancels may
        still come.
        """
        due: list[Key] = []
        while (at := self.earliest()) is not None and at <= now:
            key = heapq.heappop(self._heap)[1]
            del self._planned[key]
            del self._due[key]
            due.append(key)
        yield from due

    def _push(self, key: Key, at: float) -> None:
        self._planned[key] = at
        heapq.heappush(self._heap, (at, key))


@dataclass(slots=True)
class Counters:
    """Counts since the run began."""

    migrations: int = 0
    """Assignments that continued a response with kept tokens on another instance than before."""
    tokens_migrated: int = 0
    """Kept tokens (as far as the core knows) of those migrations."""
    redispatches: int = 0
    """Assignments of a response beyond its first."""
    losses: Counter[LossCause] = field(default_factory=Counter)
    """Instances lost, by cause."""
    preemptions: Counter[LossCause] = field(default_factory=Counter)
    """Spot machines without any instance left, by what took the last one; counted again if one comes back."""
    stale_events: int = 0
    """Events that no longer mean anything: unknown or former instance, assignment, step or lease."""
    duplicates: int = 0
    """Events that repeated what was known."""
    quarantined: list[int] = field(default_factory=list)
    """Responses given up after failing on several instances."""
    cancelled: int = 0
    """Responses dropped unfinished because the trainer asked for another step."""
    recalls: int = 0
    """Times the GPU was recalled from the trainer."""


@dataclass(slots=True)
class Context:
    """Shared by reference; only `Core.handle` sets `now` and takes `commands`."""

    now: float = 0.0
    config: CoreConfig = field(default_factory=lambda: CoreConfig(max_spot_instances=0, reserved_instances=0))
    is_ending: bool = False
    timers: Timers = field(default_factory=Timers)
    counters: Counters = field(default_factory=Counters)
    commands: list[Command] = field(default_factory=list)

    def emit(self, command: Command) -> None:
        """Ask the shell for something."""
        self.commands.append(command)
