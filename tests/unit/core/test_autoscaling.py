"""A fleet that only serves follows its load: the rule alone, then through the core."""

from __future__ import annotations

import pytest

from rlboost_runtime.core.base.autoscaling import Autoscaler, Autoscaling, ServingLoad, slots_of
from rlboost_runtime.core.base.messages import (
    FIRST_REQUEST,
    CoordinatorRestarted,
    LaunchMachine,
    MachineGone,
    Pool,
    RequestArrived,
    ResponseRequest,
    RunEnding,
    Sleep,
    TerminateMachine,
)
from rlboost_runtime.core.lease_controller import LeaseState

RULE = Autoscaling(min_instances=1, max_instances=6, fill=0.75, max_wait_s=5.0, idle_s=60.0)


def load(at: float, num_open: int, **rest) -> ServingLoad:
    known = {"longest_wait_s": 0.0, "reserved_slots": 0, "spot_slots": 8, "num_wanted_missing": 0} | rest
    return ServingLoad(at, num_open, **known)


def held(scaler: Autoscaler, num_open: int, since: float, until: float, **rest) -> int:
    """Look once a second at the same load; return what is wanted at last."""
    at = since
    while at < until:
        scaler.look(load(at, num_open, **rest))
        at += 1.0
    return scaler.wanted


# --- the rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_open", "reserved_slots", "wanted"),
    [(0, 0, 1), (6, 0, 1), (7, 0, 2), (24, 0, 4), (24, 8, 3), (900, 0, 6)],
)
def test_the_open_requests_take_the_fill_of_all_slots(
    num_open: int, reserved_slots: int, wanted: int
) -> None:
    assert held(Autoscaler(RULE), num_open, 0.0, 60.0, reserved_slots=reserved_slots) == wanted


def test_a_burst_of_a_moment_brings_no_machine() -> None:
    scaler = Autoscaler(RULE)
    held(scaler, 4, 0.0, 30.0)
    scaler.look(load(30.0, 12))
    assert held(scaler, 4, 31.0, 90.0) == 1


def test_less_load_gives_a_machine_up_only_after_idle_s_of_it() -> None:
    scaler = Autoscaler(RULE)
    assert held(scaler, 24, 0.0, 60.0) == 4
    assert held(scaler, 4, 60.0, 115.0) == 4
    assert held(scaler, 24, 115.0, 130.0) == 4, "the load came back before"
    assert held(scaler, 4, 130.0, 220.0) == 1


def test_a_load_that_swings_faster_than_idle_s_moves_no_machine() -> None:
    scaler = Autoscaler(RULE)
    held(scaler, 24, 0.0, 60.0)
    seen = {held(scaler, 24 if k % 2 else 2, 60.0 + 20.0 * k, 80.0 + 20.0 * k) for k in range(12)}
    assert seen == {4}


def test_a_request_that_waits_too_long_raises_it_by_one_once_everything_is_there() -> None:
    scaler = Autoscaler(RULE)
    held(scaler, 3, 0.0, 20.0)
    assert scaler.look(load(20.0, 3, longest_wait_s=4.0)) == 1
    assert scaler.look(load(21.0, 3, longest_wait_s=6.0)) == 2
    assert scaler.look(load(22.0, 3, longest_wait_s=7.0, num_wanted_missing=1)) == 2, "it is being started"
    assert scaler.look(load(50.0, 3, longest_wait_s=35.0)) == 3
    assert held(scaler, 3, 51.0, 120.0) == 1


def test_what_an_engine_holds_is_remembered_while_none_serves() -> None:
    scaler = Autoscaler(RULE)
    held(scaler, 24, 0.0, 30.0)
    assert held(scaler, 24, 30.0, 120.0, spot_slots=None) == 4


def test_slots_are_bounded_by_the_cache_and_by_the_speed_asked_for() -> None:
    assert slots_of(64, 10_000, None) == 64
    assert slots_of(64, 10_000, 500.0) == 20
    line = (1e-6, 0.02)  # 0.02 s and 0.5 ms per response of 500 tokens
    assert slots_of(64, 100_000, 500.0, line, min_tokens_per_s=40.0) == 10
    assert slots_of(64, 100_000, 500.0, line, min_tokens_per_s=100.0) == 1, "no engine is that fast"
    assert slots_of(64, 100_000, 500.0, line) == 64


# --- through the core --------------------------------------------------------------------------------------


@pytest.fixture
def run(new_run):
    """A run that only serves, with one reserved engine awake."""
    run = new_run(max_spot_instances=3, reserved_instances=1, autoscaling=Autoscaling(0, 3, idle_s=30.0))
    run.publish()
    run.join("head-0", Pool.RESERVED, machine="head", kv_tokens=100_000)
    run.ready("head-0")
    return run


def ask(run, count: int) -> None:
    for number in range(FIRST_REQUEST + run.core.counters.stale_events, FIRST_REQUEST + count):
        run.send(RequestArrived(run.now, ResponseRequest(number, number, 10, 100)))


def launches(commands) -> list[str]:
    return [c.machine for c in commands if isinstance(c, LaunchMachine)]


def test_the_reserved_engines_never_sleep(run) -> None:
    run.until(100.0)
    ask(run, 1)
    assert run.where() == {FIRST_REQUEST: "head-0"}
    run.finish(FIRST_REQUEST)
    run.until(200.0)
    assert run.core.lease is LeaseState.ENGINES
    assert not any(isinstance(c, Sleep) for c in run.commands)


def test_load_brings_machines_and_its_end_ends_them(run) -> None:
    assert not launches(run.until(20.0)), "the reserved engine has nothing to do"
    ask(run, 9)
    assert launches(run.until(40.0)) == ["spot-0", "spot-1"]
    for name in ("spot-0", "spot-1"):
        run.launched(name)
        run.join(f"{name}-0", machine=name, kv_tokens=100_000)
        run.ready(f"{name}-0")
    assert len(set(run.where().values())) == 3
    for number in range(FIRST_REQUEST, FIRST_REQUEST + 9):
        run.finish(number)
    assert not any(isinstance(c, TerminateMachine) for c in run.until(65.0))
    ended = {c.machine for c in run.until(90.0) if isinstance(c, TerminateMachine)}
    assert ended == {"spot-0", "spot-1"}


def test_without_any_spot_machine_the_floor_serves_everything(run) -> None:
    ask(run, 9)
    run.until(20.0)
    for name in ("spot-0", "spot-1"):
        run.launched(name)
        run.join(f"{name}-0", machine=name, kv_tokens=100_000)
        run.ready(f"{name}-0")
    for name in ("spot-0", "spot-1"):
        run.send(MachineGone(run.now, name))
    assert set(run.where().values()) == {"head-0"}
    done = 0
    while run.core.open_requests:
        run.finish(next(iter(run.where())))
        done += 1
    assert done == 9


def test_it_goes_on_after_a_restart_and_ends_with_the_run(run) -> None:
    run.send(CoordinatorRestarted(run.now))
    ask(run, 9)
    assert launches(run.until(5.0, beating=()))
    run.send(RunEnding(run.now, "stopped"))
    assert not launches(run.until(100.0))
