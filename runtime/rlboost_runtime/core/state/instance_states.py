"""The life of an instance as one table: which event may happen in which state, and what follows from it.

::

    InstanceJoined
          |
          v    PROVED              PROVED          WOKEN
       LOADING -------->  READY  <-------- WAKING <------- ASLEEP
          ^    <--------    |                |                ^
          |     REFUSED     | SLEEP_ORDERED  | SLEEP_ORDERED  | SLEPT
          |                 v                v                |
          +-------------> SLEEPING ---------------------------+
            SLEEP_ORDERED
    LOST leads from every state to GONE; nothing leads out of it.

Beside its state an instance has flags, which events set and clear. The connection, a preemption notice and an
engine's pause are flags rather than states because they come and go whatever the engine is doing.

`TABLE` is all that may happen: an event that it does not have for a state, or that meets a flag named in
`never_with`, raises `IllegalMove`. `LEGAL` is all that may be true at once: `Instance.check` asserts it. So
an order (load, sleep, wake) never goes to a closed connection, only an instance that proved a version serves
one, and only reserved instances sleep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlboost_runtime.core.base.messages import Pool


class InstanceState(StrEnum):
    """What the engine of an instance does."""

    LOADING = "loading"
    """Awake, but it has not proved a version: it has just joined, or a load failed."""
    READY = "ready"
    """It proved that it serves `Instance.version`."""
    SLEEPING = "sleeping"
    """Reserved only: ordered to free its GPU memory, has not answered yet."""
    ASLEEP = "asleep"
    """Reserved only: its GPU memory is free."""
    WAKING = "waking"
    """Reserved only: ordered to wake, has not proved a version since."""
    GONE = "gone"
    """Lost; a later registration is a new life."""


class InstanceFlag(StrEnum):
    """What else may be true of an instance."""

    DISCONNECTED = "disconnected"
    """Its connection is closed; it may come back within its grace period."""
    DRAINING = "draining"
    """It gets no more work: its machine is going."""
    NOTICED = "noticed"
    """The cloud has announced that it takes the machine."""
    PAUSED = "paused"
    """Its engine failed a moment ago: no work until the pause is over or a version is proved."""
    SERVED = "served"
    """It has proved some version since it joined."""
    SWAPPING = "swapping"
    """In the middle of a step it hands over what it runs, to load a version that it has fetched."""


class InstanceEvent(StrEnum):
    """What can happen to an instance."""

    PROVED = "proved"
    """It proved that it serves a version."""
    REFUSED = "refused"
    """It could not load a version, so it serves nothing."""
    LOAD_FAILED = "load failed"
    """The same of the version that it was last ordered to load: counted until it proves one."""
    LOAD_ORDERED = "load ordered"
    SWAP_BEGUN = "swap begun"
    """It was asked to release what it runs, as it has fetched a version that the step goes on under."""
    SWAP_VOIDED = "swap voided"
    """A newer version is wanted than the one that it was about to load."""
    ORDER_VOIDED = "order voided"
    """The order to load must be given again."""
    SLEEP_ORDERED = "sleep ordered"
    SLEPT = "slept"
    """It answered the order to sleep."""
    WOKEN = "woken"
    """It was ordered to wake."""
    DISCONNECTED = "disconnected"
    RECONNECTED = "reconnected"
    DRAINED = "drained"
    """It is to get no more work."""
    NOTICED = "noticed"
    ENGINE_FAILED = "engine failed"
    """Counted until a response finishes on it."""
    PAUSE_ENDED = "pause ended"
    WORKED = "worked"
    """A response finished on it."""
    LOST = "lost"


Flags = frozenset[InstanceFlag]
NO_FLAGS: Flags = frozenset()
ALL_FLAGS: Flags = frozenset(InstanceFlag)
_DISCONNECTED = frozenset({InstanceFlag.DISCONNECTED})
_DRAINING = frozenset({InstanceFlag.DRAINING})
_PAUSED = frozenset({InstanceFlag.PAUSED})
_SERVED = frozenset({InstanceFlag.SERVED})
_SWAPPING = frozenset({InstanceFlag.SWAPPING})
_AS_IT_IS = ALL_FLAGS - _SWAPPING
"""Only an instance that serves a version swaps it for another."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What one event does."""

    moves: Mapping[InstanceState, InstanceState]
    """The next state by the present one; in a state that is missing here the event is illegal."""
    sets: Flags = NO_FLAGS
    clears: Flags = NO_FLAGS
    never_with: Flags = NO_FLAGS
    """With any of these flags set the event is illegal."""


_S, _E = InstanceState, InstanceEvent
_WITH_WORK: dict[InstanceState, InstanceState] = {state: state for state in (_S.LOADING, _S.READY)}
_ANY: dict[InstanceState, InstanceState] = {state: state for state in InstanceState if state is not _S.GONE}

TABLE: Mapping[InstanceEvent, Transition] = {
    _E.PROVED: Transition(
        dict.fromkeys((_S.LOADING, _S.WAKING, _S.READY), _S.READY), sets=_SERVED, clears=_PAUSED | _SWAPPING
    ),
    _E.REFUSED: Transition({**_ANY, _S.READY: _S.LOADING}, clears=_SWAPPING),
    _E.LOAD_FAILED: Transition({**_ANY, _S.READY: _S.LOADING}, clears=_SWAPPING),
    _E.LOAD_ORDERED: Transition(_ANY, never_with=_DISCONNECTED | _DRAINING),
    _E.SWAP_BEGUN: Transition({_S.READY: _S.READY}, sets=_SWAPPING, never_with=_SWAPPING),
    _E.SWAP_VOIDED: Transition(_ANY, clears=_SWAPPING),
    _E.ORDER_VOIDED: Transition(_ANY),
    _E.SLEEP_ORDERED: Transition(
        dict.fromkeys((_S.LOADING, _S.WAKING, _S.READY), _S.SLEEPING),
        clears=_SWAPPING,
        never_with=_DISCONNECTED,
    ),
    _E.SLEPT: Transition({_S.SLEEPING: _S.ASLEEP}),
    _E.WOKEN: Transition({_S.ASLEEP: _S.WAKING}, never_with=_DISCONNECTED),
    _E.DISCONNECTED: Transition(_ANY, sets=_DISCONNECTED),
    _E.RECONNECTED: Transition(_ANY, clears=_DISCONNECTED),
    _E.DRAINED: Transition(_ANY, sets=_DRAINING),
    _E.NOTICED: Transition(_ANY, sets=_DRAINING | {InstanceFlag.NOTICED}),
    _E.ENGINE_FAILED: Transition(_WITH_WORK, sets=_PAUSED, never_with=_PAUSED),
    _E.PAUSE_ENDED: Transition(_ANY, clears=_PAUSED),
    _E.WORKED: Transition(_WITH_WORK),
    _E.LOST: Transition(dict.fromkeys(_ANY, _S.GONE), clears=ALL_FLAGS),
}

MOVES: Mapping[InstanceState, frozenset[InstanceState]] = {
    state: frozenset(t.moves[state] for t in TABLE.values() if state in t.moves) for state in InstanceState
}
"""The same without the events: the states that may follow a state."""


@dataclass(frozen=True, slots=True)
class Legal:
    """What may be true of an instance in one state."""

    serves: bool = False
    """It has a version, and no failed load since it proved it; else it has none."""
    may_work: bool = False
    """It may hold assignments."""
    pools: frozenset[Pool] = frozenset({Pool.RESERVED})
    required: Flags = NO_FLAGS
    allowed: Flags = ALL_FLAGS


LEGAL: Mapping[InstanceState, Legal] = {
    _S.LOADING: Legal(
        may_work=True, pools=frozenset(Pool), allowed=_AS_IT_IS
    ),  # it may have work to hand over
    _S.READY: Legal(serves=True, may_work=True, pools=frozenset(Pool), required=_SERVED),
    _S.SLEEPING: Legal(allowed=_AS_IT_IS),
    _S.ASLEEP: Legal(allowed=_AS_IT_IS),
    _S.WAKING: Legal(allowed=_AS_IT_IS),
    _S.GONE: Legal(pools=frozenset(Pool), allowed=NO_FLAGS),
}

IMPLIED: Mapping[InstanceFlag, InstanceFlag] = {InstanceFlag.NOTICED: InstanceFlag.DRAINING}
"""A flag, and the one that is always set with it."""
