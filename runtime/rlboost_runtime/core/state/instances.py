"""Rollout instances as the core knows them: their lives, what they hold, and who is still alive.

Guarantees: an instance is known under one epoch at a time and epochs only grow; what it holds and how full
it is (`kv_load`) always agree (`Instance.check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from rlboost_runtime.core.base.messages import InstanceJoined, LossCause, Pool
from rlboost_runtime.core.base.state_machine import StateMachine
from rlboost_runtime.core.state.responses import Response


class InstanceState(StrEnum):
    """Where an instance is in its life. Draining and disconnected are shown over the others."""

    LOADING = "loading"
    """Awake, but it has not proved a version: joined, woken, or a load was refused."""
    READY = "ready"
    """It proved that it serves `Instance.version`."""
    SLEEPING = "sleeping"
    """Reserved only: told to free its GPU memory, has not answered yet."""
    ASLEEP = "asleep"
    """Reserved only: its GPU memory is free."""
    GONE = "gone"
    """Lost; a later registration is a new life."""
    DRAINING = "draining"
    """Shown only: its machine is going, it gets no more work."""
    DISCONNECTED = "disconnected"
    """Shown only: its connection is closed, it may still come back."""


LEGAL = {
    InstanceState.LOADING: frozenset({InstanceState.READY, InstanceState.SLEEPING, InstanceState.GONE}),
    InstanceState.READY: frozenset({InstanceState.LOADING, InstanceState.SLEEPING, InstanceState.GONE}),
    InstanceState.SLEEPING: frozenset({InstanceState.ASLEEP, InstanceState.GONE}),
    InstanceState.ASLEEP: frozenset({InstanceState.LOADING, InstanceState.GONE}),
    InstanceState.GONE: frozenset[InstanceState](),
}


@dataclass(slots=True, eq=False)
class Instance:
    """One instance under one epoch."""

    instance: str
    machine: str
    pool: Pool
    epoch: int
    max_running: int
    kv_tokens: int
    joined_at: float
    lifecycle: StateMachine[InstanceState]
    version: int | None = None
    """The version that it proved and serves."""
    told_version: int | None = None
    """The version that it was last told to load."""
    has_served: bool = False
    """It has proved some version since it joined."""
    is_draining: bool = False
    is_noticed: bool = False
    is_connected: bool = True
    grace_cause: LossCause = LossCause.RESET
    """What its loss is called if it does not come back."""
    wake_sent: bool = False
    """A Wake is out, no version proved since."""
    refusals: int = 0
    """Loads refused in a row."""
    engine_failures: int = 0
    """Pauses after a failed engine in a row."""
    is_paused: bool = False
    """Its engine failed a moment ago: no work until the pause is over or a version is proved."""
    progress: int | None = None
    """The engine's progress counter as last heard."""
    assignments: dict[int, Response] = field(default_factory=dict)
    aborting: dict[int, None] = field(default_factory=dict)
    """Assignments that it was told to stop and has not released."""
    kv_load: int = 0
    """KV tokens booked for its assignments."""
    num_queued: int = 0
    """Assignments that it does not execute yet, as far as it tells; 0 for one that does not tell."""
    tells_queue: bool = False
    beaten_at: float | None = None
    """Time of its last heartbeat that told tokens."""

    @property
    def state(self) -> InstanceState:
        """What to show: disconnected and draining hide the rest."""
        if not self.is_alive:
            return InstanceState.GONE
        if not self.is_connected:
            return InstanceState.DISCONNECTED
        return InstanceState.DRAINING if self.is_draining else self.lifecycle.state

    @property
    def is_alive(self) -> bool:
        """Whether it has not been lost."""
        return self.lifecycle.state is not InstanceState.GONE

    @property
    def is_present(self) -> bool:
        """Whether it counts as an active instance for seeding and sizing."""
        return self.lifecycle.state is InstanceState.READY and not self.is_draining

    @property
    def is_awake(self) -> bool:
        """Whether it may hold GPU memory beyond the next message."""
        return self.lifecycle.state in (InstanceState.LOADING, InstanceState.READY)

    @property
    def num_assigned(self) -> int:
        """Assignments that it holds."""
        return len(self.assignments)

    @property
    def num_executing(self) -> int:
        """Assignments that it decodes, as far as it tells, and that were not taken away."""
        return max(0, len(self.assignments) - self.num_queued - len(self.aborting))

    @property
    def share(self) -> float:
        """How full it is: booked KV tokens over its capacity."""
        return self.kv_load / max(1, self.kv_tokens)

    @property
    def fill(self) -> float:
        """Assignments over the most that it decodes at once."""
        return len(self.assignments) / max(1, self.max_running)

    def can_serve(self, version: int) -> bool:
        """Return whether it may be given work under `version` as far as it alone is concerned."""
        return self.is_present and self.is_connected and self.version == version

    def can_admit(self, kv_estimate: int) -> bool:
        """Return whether one more response of that size fits; an empty instance always takes one."""
        if not self.assignments:
            return True
        return len(self.assignments) < self.max_running and self.kv_load + kv_estimate <= self.kv_tokens

    def hold(self, assignment: int, response: Response, kv_estimate: int) -> None:
        """Book an assignment."""
        self.assignments[assignment] = response
        response.kv_estimate = kv_estimate
        self.kv_load += kv_estimate
        self.num_queued += self.tells_queue

    def let_go(self, assignment: int) -> None:
        """Unbook an assignment; call before the response forgets its estimate."""
        self.kv_load -= self.assignments.pop(assignment).kv_estimate
        self.aborting.pop(assignment, None)
        self.num_queued = min(self.num_queued, len(self.assignments))

    def rebook(self, response: Response, kv_estimate: int) -> None:
        """Correct how much is booked for a response that it holds."""
        self.kv_load += kv_estimate - response.kv_estimate
        response.kv_estimate = kv_estimate

    def check(self) -> None:
        """Assert that what it holds agrees with how full it is."""
        timeline = self.lifecycle
        assert self.kv_load == sum(r.kv_estimate for r in self.assignments.values()), (
            f"booked wrongly, {timeline}"
        )
        assert len(self.assignments) <= max(1, self.max_running), f"too full, {timeline}"
        assert self.aborting.keys() <= self.assignments.keys(), f"aborts what it does not hold, {timeline}"
        assert (self.lifecycle.state is InstanceState.READY) == (self.version is not None), (
            f"version, {timeline}"
        )
        asleep = self.lifecycle.state in (InstanceState.SLEEPING, InstanceState.ASLEEP)
        assert not (asleep and self.assignments), f"asleep with work, {timeline}"
        assert not (asleep and self.pool is Pool.SPOT), f"a spot instance sleeps, {timeline}"


class InstanceTable:
    """Who is alive, under which epoch."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.reserved: dict[str, Instance] = {}
        self._last_epoch: int | None = None

    def is_news(self, event: InstanceJoined) -> bool:
        """Return whether the registration is newer than all before it."""
        return self._last_epoch is None or event.epoch > self._last_epoch

    def join(self, event: InstanceJoined) -> Instance:
        """Begin the life of an instance that is not alive."""
        assert event.instance not in self.instances
        name = f"instance {event.instance} epoch {event.epoch}"
        instance = Instance(
            instance=event.instance,
            machine=event.machine,
            pool=event.pool,
            epoch=event.epoch,
            max_running=event.max_running,
            kv_tokens=event.kv_tokens,
            joined_at=event.at,
            lifecycle=StateMachine(name, InstanceState.LOADING, LEGAL, event.at),
        )
        self._last_epoch = event.epoch
        self.instances[event.instance] = instance
        if event.pool is Pool.RESERVED:
            self.reserved[event.instance] = instance
        return instance

    def current(self, instance: str, epoch: int) -> Instance | None:
        """Return the instance if it is alive under that epoch."""
        known = self.instances.get(instance)
        return known if known is not None and known.epoch == epoch else None

    def remove(self, instance: Instance) -> None:
        """Forget a lost instance."""
        del self.instances[instance.instance]
        self.reserved.pop(instance.instance, None)

    def spot(self) -> Iterator[Instance]:
        """Yield the spot instances."""
        return (i for i in self.instances.values() if i.pool is Pool.SPOT)
