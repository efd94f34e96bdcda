"""Rollout instances as the core knows them: their lives, what they hold, and which are still alive.

Guarantees: an instance is known under one epoch at a time and epochs only grow; what it holds and how full
it is (`kv_load`) always agree; its state and flags change only as `instance_states.TABLE` allows and are
always a combination that `instance_states.LEGAL` has (`Instance.check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlboost_runtime.core.base.messages import InstanceJoined, LossCause, Pool
from rlboost_runtime.core.base.state_machine import StateMachine
from rlboost_runtime.core.state.instance_states import (
    IMPLIED,
    LEGAL,
    MOVES,
    NO_FLAGS,
    TABLE,
    Flags,
    InstanceEvent,
    InstanceFlag,
    InstanceState,
)
from rlboost_runtime.core.state.rates import Kind
from rlboost_runtime.core.state.responses import Response

FEW = 16
"""Responses at their limit. In a cache for fewer, growth does not even out: it is booked whole."""


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
    lifecycle: StateMachine[InstanceState] = field(init=False)
    flags: Flags = NO_FLAGS
    version: int | None = None
    """The version that it proved and serves."""
    kv_block_tokens: int = 0
    """Tokens of a block of its KV cache; 0: not known."""
    ordered_version: int | None = None
    """The version that it was last ordered to load; None: the order must be given (again)."""
    failed_loads: int = 0
    """In a row."""
    engine_failures: int = 0
    """In a row; each is followed by a pause."""
    loss_cause: LossCause = LossCause.RESET
    """What its loss is counted as if it does not come back after a disconnect."""
    progress: int | None = None
    """The engine's progress counter in the last heartbeat."""
    assignments: dict[int, Response] = field(default_factory=dict)
    aborting: dict[int, None] = field(default_factory=dict)
    """Assignments that it was asked to stop and has not released."""
    kv_load: int = 0
    """KV tokens booked for its assignments."""
    reported_queue: int | None = None
    """Assignments that it does not execute yet, as far as is known; None: its heartbeats do not report it."""
    measured_at: float | None = None
    """Time of its last heartbeat with token counts; None: none since it last became idle."""

    def __post_init__(self) -> None:
        """Begin its life."""
        name = f"instance {self.instance} epoch {self.epoch}"
        self.lifecycle = StateMachine(name, InstanceState.LOADING, MOVES, self.joined_at)

    # --- its life -----------------------------------------------------------------------------------------

    def accepts(self, event: InstanceEvent) -> bool:
        """Return True if the event may happen now."""
        transition = TABLE[event]
        return self.state in transition.moves and not transition.never_with & self.flags

    def apply(
        self,
        event: InstanceEvent,
        at: float,
        why: str = "",
        *,
        version: int | None = None,
        cause: LossCause | None = None,
    ) -> None:
        """Change state and flags as `TABLE` has it: the only place where they are written.

        `version`: what was proved or ordered; `cause`: what the loss of a disconnected instance is counted
        as. Raises `IllegalMove` for an event that may not happen now.
        """
        if not self.accepts(event):
            raise self.lifecycle.illegal(f"{event} with flags {sorted(self.flags)}", why, at)
        transition = TABLE[event]
        to = transition.moves[self.state]
        if to is not self.state:
            self.lifecycle.move(to, why or event, at)
        self.flags = (self.flags | transition.sets) - transition.clears
        if to is not InstanceState.READY:
            self.version = None
        match event:
            case InstanceEvent.PROVED:
                self.version, self.failed_loads = version, 0
            case InstanceEvent.LOAD_FAILED:
                self.failed_loads += 1
            case InstanceEvent.LOAD_ORDERED | InstanceEvent.ORDER_VOIDED:
                self.ordered_version = version
            case InstanceEvent.DISCONNECTED if cause is not None:
                self.loss_cause = cause
            case InstanceEvent.ENGINE_FAILED:
                self.engine_failures += 1
            case InstanceEvent.WORKED:
                self.engine_failures = 0
            case _:
                pass

    @property
    def state(self) -> InstanceState:
        """What its engine does."""
        return self.lifecycle.state

    @property
    def shown_state(self) -> str:
        """What status shows: `disconnected` and `draining` hide the state."""
        if not self.is_connected:
            return InstanceFlag.DISCONNECTED
        if self.is_draining:
            return InstanceFlag.DRAINING
        return InstanceState.LOADING if self.state is InstanceState.WAKING else self.state

    @property
    def is_alive(self) -> bool:
        """True until it is lost or leaves."""
        return self.state is not InstanceState.GONE

    @property
    def is_connected(self) -> bool:
        """True if its connection is open."""
        return InstanceFlag.DISCONNECTED not in self.flags

    @property
    def is_draining(self) -> bool:
        """True if it gets no more work because its machine is going."""
        return InstanceFlag.DRAINING in self.flags

    @property
    def is_noticed(self) -> bool:
        """True if the cloud has announced that it takes the machine."""
        return InstanceFlag.NOTICED in self.flags

    @property
    def is_paused(self) -> bool:
        """True if its engine failed a moment ago."""
        return InstanceFlag.PAUSED in self.flags

    @property
    def is_swapping(self) -> bool:
        """True if it hands over what it runs, to load a version in the middle of a step."""
        return InstanceFlag.SWAPPING in self.flags

    @property
    def has_served(self) -> bool:
        """True if it has proved some version since it joined."""
        return InstanceFlag.SERVED in self.flags

    @property
    def is_present(self) -> bool:
        """True if it counts as an active instance for seeding and sizing."""
        return self.state is InstanceState.READY and not self.is_draining

    @property
    def is_awake(self) -> bool:
        """True if it may hold GPU memory beyond the next message."""
        return self.state in (InstanceState.LOADING, InstanceState.WAKING, InstanceState.READY)

    # --- its work -----------------------------------------------------------------------------------------

    @property
    def num_assigned(self) -> int:
        """Assignments that it holds."""
        return len(self.assignments)

    @property
    def num_queued(self) -> int:
        """Assignments that it does not execute yet; 0 if its heartbeats do not report it."""
        return self.reported_queue or 0

    @property
    def num_executing(self) -> int:
        """Assignments that it decodes, as far as is known, and that were not taken away."""
        return max(0, len(self.assignments) - self.num_queued - len(self.aborting))

    @property
    def kind(self) -> Kind:
        """What kind of engine it is."""
        return self.kv_tokens, self.max_running

    @property
    def share(self) -> float:
        """How full it is: booked KV tokens over its capacity."""
        return self.kv_load / max(1, self.kv_tokens)

    @property
    def fill(self) -> float:
        """Assignments over the most that it decodes at once."""
        return len(self.assignments) / max(1, self.max_running)

    def can_serve(self, oldest: int, newest: int) -> bool:
        """Return True if it may be given work under one of these versions as far as it alone is concerned."""
        is_there = self.is_present and self.is_connected
        return is_there and self.version is not None and oldest <= self.version <= newest

    def can_admit(self, kv_estimate: int, fill_limit: float = 1.0) -> bool:
        """Return True if one more response of that size fits into `fill_limit` of the KV capacity; an empty
        instance always takes one."""
        if not self.assignments:
            return True
        room = fill_limit * self.kv_tokens - self.kv_load
        return len(self.assignments) < self.max_running and kv_estimate <= room

    def is_small_for(self, response: Response) -> bool:
        """Return True if its cache holds only a few responses that become as long as this one may."""
        return self.kv_tokens < FEW * response.kv_limit

    def can_hold(self, response: Response) -> bool:
        """Return True if one more response fits even if all become as long as they may; an empty instance
        always takes one."""
        if not self.assignments:
            return True
        return self.num_assigned < self.max_running and self.whole_blocks(response) <= self.kv_room

    @property
    def kv_room(self) -> int:
        """KV tokens left even if all assignments become as long as they may. Looks at all of them."""
        return self.kv_tokens - sum(map(self.whole_blocks, self.assignments.values()))

    def whole_blocks(self, response: Response) -> int:
        """Return the KV tokens that a response takes at most: an engine allocates whole blocks."""
        block = max(1, self.kv_block_tokens)
        return -(-response.kv_limit // block) * block

    def hold(self, assignment: int, response: Response, kv_estimate: int) -> None:
        """Book an assignment."""
        self.assignments[assignment] = response
        response.kv_estimate = kv_estimate
        self.kv_load += kv_estimate
        if self.reported_queue is not None:
            self.reported_queue += 1

    def let_go(self, assignment: int) -> None:
        """Unbook an assignment; call before the response forgets its estimate."""
        self.kv_load -= self.assignments.pop(assignment).kv_estimate
        self.aborting.pop(assignment, None)
        if self.reported_queue is not None:
            self.reported_queue = min(self.reported_queue, len(self.assignments))

    def rebook(self, response: Response, kv_estimate: int) -> None:
        """Correct how much is booked for a response that it holds."""
        self.kv_load += kv_estimate - response.kv_estimate
        response.kv_estimate = kv_estimate

    def check(self) -> None:
        """Assert that `LEGAL` has the combination of state and flags, and that the booking adds up."""
        life, legal = self.lifecycle, LEGAL[self.state]
        assert legal.required <= self.flags <= legal.allowed, f"flags {sorted(self.flags)}, {life}"
        for flag, implied in IMPLIED.items():
            assert flag not in self.flags or implied in self.flags, f"{flag} without {implied}, {life}"
        assert legal.serves == (self.version is not None), f"version {self.version}, {life}"
        assert not (legal.serves and self.failed_loads), f"serves after a failed load, {life}"
        assert legal.may_work or not self.assignments, f"holds work, {life}"
        assert self.pool in legal.pools, f"a {self.pool} instance, {life}"
        booked = sum(r.kv_estimate for r in self.assignments.values())
        assert self.kv_load == booked, f"booked wrongly, {life}"
        assert len(self.assignments) <= max(1, self.max_running), f"too full, {life}"
        assert self.aborting.keys() <= self.assignments.keys(), f"aborts what it does not hold, {life}"


class InstanceTable:
    """The live instances, each under its epoch."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.reserved: dict[str, Instance] = {}
        self._last_epoch: int | None = None

    def is_new(self, event: InstanceJoined) -> bool:
        """Return True if the registration is newer than all before it."""
        return self._last_epoch is None or event.epoch > self._last_epoch

    def join(self, event: InstanceJoined) -> Instance:
        """Begin the life of an instance that is not alive."""
        assert event.instance not in self.instances
        instance = Instance(
            instance=event.instance,
            machine=event.machine,
            pool=event.pool,
            epoch=event.epoch,
            max_running=event.max_running,
            kv_tokens=event.kv_tokens,
            joined_at=event.at,
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
