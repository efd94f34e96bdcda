"""What a trainer that takes whole groups asks of the scheduler, and caches that hold only a few responses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_runtime.core.base.messages import RLBOOST, Abort, InstanceLeft, InstanceReady, LossCause
from rlboost_runtime.core.dispatch.assignments import YIELD_S

PLAIN = replace(RLBOOST, fits_small_caches=False, fill_limit=1.0)


def test_a_small_cache_is_booked_for_whole_responses_and_a_large_one_for_a_part_of_their_growth(
    new_run,
) -> None:
    run = new_run(policy=replace(RLBOOST, fill_limit=1.0))
    run.publish()
    run.join("a", max_running=99, kv_tokens=4 * 112)
    run.send(InstanceReady(run.now, "a", run.epoch("a"), 0, 4 * 112, 16))  # 110 tokens: seven blocks of 16
    assert len(run.assigned(run.step(0, groups=99, prompt=10, limit=100))) == 4
    assert len(run.assigned(run.finish(0, 20))) == 1, "one ends, one begins"
    run.ready("a", kv_tokens=16 * 112)
    held = run.core.instances["a"]
    assert held.num_assigned > 16, "sixteen fit at their limit, and more than that are booked"


def test_a_cache_for_four_whole_responses_holds_four_below_the_usual_fill_limit(new_run) -> None:
    run = new_run()
    run.publish()
    run.join("a", max_running=99, kv_tokens=99 * 112)
    run.send(InstanceReady(run.now, "a", run.epoch("a"), 0, 4 * 112, 16))
    assert run.core.config.policy.fill_limit < 1
    assert len(run.assigned(run.step(0, groups=99, prompt=10, limit=100))) == 4
    assert run.core.instances["a"].kv_room == 0


def test_what_an_engine_runs_at_once_follows_from_its_report(new_run) -> None:
    run = new_run()
    run.publish()
    run.join("a", max_running=512, kv_tokens=512_000)
    run.send(InstanceReady(run.now, "a", run.epoch("a"), 0, 256_000, 16, 3))
    assert len(run.assigned(run.step(0, groups=9, prompt=10, limit=100))) == 3
    run.ready("a")
    assert run.core.instances["a"].max_running == 3, "a report without it changes nothing"


def test_a_fill_limit_leaves_room(new_run) -> None:
    run = new_run(policy=replace(PLAIN, fill_limit=0.5), max_spot_instances=1)
    run.publish()
    run.spot("a", max_running=99, kv_tokens=100)
    assert len(run.assigned(run.step(groups=9, prompt=10, limit=100))) == 2  # 10 + 50 / 4: 22 each


@pytest.mark.parametrize(("most_spot", "placed"), [(4, 2), (0, 4)])
def test_a_run_without_spot_instances_fills_its_engines(new_run, most_spot: int, placed: int) -> None:
    run = new_run(policy=replace(PLAIN, fill_limit=0.5), max_spot_instances=most_spot, reserved_instances=1)
    run.publish()
    run.reserved(max_running=99, kv_tokens=100)
    run.step(groups=9, prompt=10, limit=100)
    assert len(run.assigned(run.ready("head-0"))) == placed  # 22 tokens each


def two_groups(new_run, slots: int, **rules: bool):
    run = new_run(policy=replace(PLAIN, **rules))
    run.publish()
    run.spot("a", max_running=slots)
    run.step(groups=2, size=4)
    return run


@pytest.mark.parametrize("by_group", [True, False])
def test_responses_of_the_group_nearest_to_its_end_go_first(new_run, by_group: bool) -> None:
    run = two_groups(new_run, 6, nearest_group_first=by_group, yields=False)
    run.finish(4)
    run.finish(5)  # of the second group two are left, of the first four
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.NOTICED))
    run.spot("b", max_running=2)
    assert set(run.core.responses_on("b")) == ({6, 7} if by_group else {0, 1})


@pytest.mark.parametrize("yields", [True, False])
def test_a_running_response_gives_way_once_to_one_whose_group_lacks_two_fewer(new_run, yields: bool) -> None:
    run = two_groups(new_run, 4, yields=yields)
    assert run.core.responses_on("a") == [0, 1, 2, 3]
    run.finish(4)
    assert not [c for c in run.until(run.now + 2 * YIELD_S) if isinstance(c, Abort)], "three against four"
    run.finish(5)
    run.finish(6)
    taken = [c.assignment for c in run.until(run.now + 2 * YIELD_S) if isinstance(c, Abort)]
    assert len(taken) == (1 if yields else 0), "as many as wait"
    if yields:
        gives = run.core.instances["a"].assignments[taken[0]].response
        assert run.assigned(run.release(gives)) == {7: "a"}
        assert run.core.response(gives).has_yielded
