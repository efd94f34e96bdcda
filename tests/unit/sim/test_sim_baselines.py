"""The published code's dispatch: whole groups, a few a second, in turn to instances without a queue."""

from __future__ import annotations

from rlboost_runtime.core.base.messages import Heartbeat
from rlboost_runtime.sim.baselines.dispatch import GROUPS_PER_LOOK
from rlboost_runtime.sim.policies import POLYRL


def polyrl(new_run, *names: str, **capacity: int):
    run = new_run(max_spot_instances=len(names), policy=POLYRL)
    run.publish()
    run.spot(*names, **{"max_running": 8, **capacity})
    return run


def beat(run, name: str, queued: int) -> list:
    return run.send(Heartbeat(run.now, name, run.epoch(name), round(1e3 * run.now), (), queued))


def test_groups_go_in_turn_and_only_so_many_a_second(new_run) -> None:
    run = polyrl(new_run, "a", "b", "c")
    given = run.assigned(run.step(groups=7, size=2))
    assert [given[2 * group] for group in range(GROUPS_PER_LOOK)] == ["a", "b", "c", "a"]
    assert len(given) == 2 * GROUPS_PER_LOOK
    later = run.assigned(run.until(1.0))
    assert [later[2 * group] for group in range(GROUPS_PER_LOOK, 7)] == ["b", "c", "a"]


def test_who_has_a_queue_is_passed_over_until_it_has_none(new_run) -> None:
    run = polyrl(new_run, "a", "b")
    run.step(groups=9)
    beat(run, "a", 1)
    assert set(run.assigned(run.until(1.0)).values()) == {"b"}
    beat(run, "b", 1)
    assert run.assigned(run.until(2.5)) == {}, "nobody is free"
    assert run.assigned(beat(run, "a", 0)) == {8: "a"}


def test_a_group_waits_until_all_of_it_is_released_and_continues_from_the_shortest(new_run) -> None:
    run = polyrl(new_run, "a", "b")
    assert run.assigned(run.step(groups=1, size=3)) == dict.fromkeys(range(3), "a")
    assert run.assigned(run.release(0, 9)) == {}
    assert run.assigned(run.release(1, 4)) == {}
    given = run.release(2, 6)
    assert run.assigned(given) == dict.fromkeys(range(3), "b")
    assert {command.keep_tokens for command in given} == {4, None}


def test_what_is_left_of_a_group_is_given_out_although_its_sibling_finished(new_run) -> None:
    run = polyrl(new_run, "a", "b")
    run.step(groups=1, size=2)
    assert run.assigned(run.release(0, 9)) == {}
    assert run.assigned(run.finish(1)) == {}, "looked at once a second"
    assert run.assigned(run.until(1.0)) == {0: "b"}
