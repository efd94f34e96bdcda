"""The table of an instance's life: every event in every state, and every combination that `check` refuses."""

from __future__ import annotations

from itertools import product

import pytest

from rlboost_runtime.core.base.messages import Disconnected, LossCause, Pool
from rlboost_runtime.core.base.state_machine import IllegalMove
from rlboost_runtime.core.state.instance_states import (
    ALL_FLAGS,
    IMPLIED,
    LEGAL,
    NO_FLAGS,
    TABLE,
    Flags,
    InstanceEvent,
    InstanceFlag,
    InstanceState,
)
from rlboost_runtime.core.state.instances import Instance

E, S, F = InstanceEvent, InstanceState, InstanceFlag

WAY_TO = {
    S.LOADING: (),
    S.READY: (E.PROVED,),
    S.SLEEPING: (E.SLEEP_ORDERED,),
    S.ASLEEP: (E.SLEEP_ORDERED, E.SLEPT),
    S.WAKING: (E.SLEEP_ORDERED, E.SLEPT, E.WOKEN),
    S.GONE: (E.LOST,),
}
SETS_FLAG = {
    F.DISCONNECTED: E.DISCONNECTED,
    F.DRAINING: E.DRAINED,
    F.NOTICED: E.NOTICED,
    F.PAUSED: E.ENGINE_FAILED,
    F.SWAPPING: E.SWAP_BEGUN,
}


def apply(instance: Instance, event: InstanceEvent) -> None:
    instance.apply(event, 1.0, version=3 if event in (E.PROVED, E.LOAD_ORDERED) else None)


def instance_in(state: InstanceState, pool: Pool = Pool.RESERVED) -> Instance:
    instance = Instance("a", "m", pool, 0, max_running=4, kv_tokens=100, joined_at=0.0)
    for event in WAY_TO[state]:
        apply(instance, event)
    assert instance.state is state
    instance.check()
    return instance


@pytest.mark.parametrize(("state", "event"), list(product(InstanceState, InstanceEvent)))
def test_every_event_is_in_the_table_for_a_state_or_raises(
    state: InstanceState, event: InstanceEvent
) -> None:
    instance = instance_in(state)
    if state not in TABLE[event].moves:
        assert not instance.accepts(event)
        with pytest.raises(IllegalMove, match=rf"epoch 0: {state} {event} .*history: 0 s loading"):
            apply(instance, event)
        return
    before = instance.flags
    apply(instance, event)
    assert instance.state is TABLE[event].moves[state]
    assert instance.flags == (before | TABLE[event].sets) - TABLE[event].clears
    instance.check()


@pytest.mark.parametrize(
    ("event", "flag"), [(event, flag) for event in E for flag in sorted(TABLE[event].never_with)]
)
def test_an_event_raises_with_a_flag_that_excludes_it(event: InstanceEvent, flag: InstanceFlag) -> None:
    state = next(iter(TABLE[event].moves))
    instance = instance_in(state)
    apply(instance, SETS_FLAG[flag])
    assert not instance.accepts(event)
    with pytest.raises(IllegalMove, match=flag):
        apply(instance, event)


def test_nothing_leads_out_of_gone() -> None:
    assert all(S.GONE not in transition.moves for transition in TABLE.values())


def is_legal(state: InstanceState, flags: Flags) -> bool:
    legal = LEGAL[state]
    implied = all(other in flags for flag, other in IMPLIED.items() if flag in flags)
    return implied and legal.required <= flags <= legal.allowed


@pytest.mark.parametrize("state", list(InstanceState))
def test_check_refuses_flags_that_are_not_legal_in_a_state(state: InstanceState) -> None:
    refused = 0
    for bits in range(2 ** len(ALL_FLAGS)):
        flags = frozenset(flag for index, flag in enumerate(InstanceFlag) if bits >> index & 1)
        instance = instance_in(state)
        instance.flags = flags
        if is_legal(state, flags):
            instance.check()
            continue
        refused += 1
        with pytest.raises(AssertionError):
            instance.check()
    assert refused, "NOTICED without DRAINING at least"


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (S.READY, {"version": None}),
        (S.READY, {"failed_loads": 1}),
        (S.READY, {"flags": NO_FLAGS}),
        (S.LOADING, {"version": 3}),
        (S.ASLEEP, {"pool": Pool.SPOT}),
        (S.WAKING, {"pool": Pool.SPOT}),
        (S.LOADING, {"flags": frozenset({F.NOTICED})}),
    ],
)
def test_check_refuses_an_illegal_combination(state: InstanceState, fields: dict[str, object]) -> None:
    instance = instance_in(state)
    for name, value in fields.items():
        setattr(instance, name, value)
    with pytest.raises(AssertionError, match=r"instance a epoch 0: 0 s loading \(created\)"):
        instance.check()


def test_the_core_refuses_an_illegal_combination(new_run) -> None:
    run = new_run()
    run.spot("a")
    run.core.instances["a"].flags |= {F.NOTICED}
    with pytest.raises(AssertionError, match="noticed without draining"):
        run.core.check()


def test_a_loss_after_a_disconnect_is_counted_as_its_cause() -> None:
    instance = instance_in(S.READY)
    instance.apply(E.DISCONNECTED, 1.0, cause=LossCause.SILENT)
    assert instance.loss_cause is LossCause.SILENT
    assert instance.shown_state == "disconnected"


def test_a_waking_instance_is_shown_as_loading(new_run) -> None:
    run = new_run(reserved_instances=1)
    run.publish()
    run.reserved()
    run.step()
    assert run.core.instances["head-0"].state is S.WAKING
    assert run.core.instances["head-0"].shown_state == "loading"
    run.send(Disconnected(0.0, "head-0", run.epoch("head-0")))
    assert run.core.instances["head-0"].state is S.WAKING
