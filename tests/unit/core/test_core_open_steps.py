"""Several open steps: a step is asked for while those before it are rolled out, whose responses go first."""

from __future__ import annotations

import pytest

from rlboost_runtime.core.base.messages import (
    Abort,
    DeliverGroup,
    InstanceLeft,
    LossCause,
    RecallLease,
    ResponseRequest,
    StepStarted,
    StepTrained,
    VersionFetched,
)
from rlboost_runtime.core.lease_controller import LeaseState


def ask(
    run,
    step: int,
    numbers: range,
    *,
    version: int = 0,
    since: int | None = 0,
    size: int = 1,
    holds: bool = True,
):
    requests = tuple(ResponseRequest(number, i // size, 10, 100) for i, number in enumerate(numbers))
    return run.send(
        StepStarted(
            run.now, step, version, requests, keeps_lease=holds, in_flight_updates=True, open_from=since
        )
    )


@pytest.fixture
def run(new_run):
    """Two instances of three slots each, and steps 0 and 1 of four responses each."""
    run = new_run()
    run.publish(0)
    run.spot("a", "b", max_running=3)
    ask(run, 0, range(4))
    ask(run, 1, range(4, 8))
    return run


def steps_of(run) -> list[int]:
    return [step.step for step in run.core.open_steps]


def test_the_earlier_step_goes_first_and_the_later_one_fills_what_is_left(run) -> None:
    assert sorted(run.where()) == [0, 1, 2, 3, 4, 5]
    assert steps_of(run) == [0, 1]
    run.finish(0)
    assert sorted(run.where()) == [1, 2, 3, 4, 5, 6]


def test_a_group_is_delivered_as_one_of_its_own_step(run) -> None:
    assert DeliverGroup(1, 0) in run.finish(4)
    assert DeliverGroup(0, 0) in run.finish(0)


def test_what_is_lost_of_the_earlier_step_comes_before_what_waits_of_the_later(run) -> None:
    run.release(3, 9)
    assert 3 in run.where(), "it takes the place that became free, not 6"
    assert run.core.response(3).num_tokens == 9


def test_a_running_response_of_the_later_step_gives_way_to_one_of_the_earlier(run) -> None:
    run.send(InstanceLeft(run.now, "b", run.epoch("b"), LossCause.RESET))
    waiting = {number for number in range(4) if number not in run.where()}
    later = {number for number in run.where() if number >= 4}
    assert waiting
    assert later
    aborted = {c.assignment for c in run.until(run.now + 4.0) if isinstance(c, Abort)}
    assert aborted == {a for a, response, _ in run.core.assignments() if response in later}
    for number in later:
        run.release(number, 3)
    assert set(run.where()) <= {0, 1, 2, 3}


def test_a_trained_step_is_closed_and_the_next_one_is_the_first(run) -> None:
    for number in range(4):
        run.finish(number)
    run.publish(1)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert steps_of(run) == [1]
    ask(run, 2, range(8, 12), version=1, since=1)
    assert steps_of(run) == [1, 2]
    assert run.core.counters.cancelled == 0


def test_a_report_of_a_step_that_has_work_left_means_nothing(run) -> None:
    run.finish(0)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert steps_of(run) == [0, 1]
    assert run.core.counters.stale_events == 1


def test_a_response_is_generated_by_no_version_older_than_its_step(run) -> None:
    for number in range(4):
        run.finish(number)
    for number in (4, 5, 6):
        run.finish(number)  # 7 of step 1 is left: it may go on under version 0
    run.publish(1)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    ask(run, 2, range(8, 12), version=1, since=1)
    assert set(run.where()) == {7}, "both serve version 0"
    run.send(VersionFetched(run.now, "b", run.epoch("b"), 1))
    for number in [number for number, holder in run.where().items() if holder == "b"]:
        run.release(number, 3)
    run.ready("b", 1)
    where = run.where()
    assert {where[number] for number in where if number >= 8} == {"b"}
    assert 7 in where


def test_a_trainer_that_asks_again_gets_both_steps_again(run) -> None:
    run.finish(0)
    run.finish(5)
    again = ask(run, 0, range(4))
    assert [c for c in again if isinstance(c, DeliverGroup)] == [DeliverGroup(0, 0)]
    again = ask(run, 1, range(4, 8))
    assert [c for c in again if isinstance(c, DeliverGroup)] == [DeliverGroup(1, 1)]
    assert steps_of(run) == [0, 1]
    assert run.core.counters.cancelled == 0


def test_an_earlier_step_that_is_asked_for_otherwise_closes_those_after_it(run) -> None:
    run.finish(4)
    ask(run, 0, range(20, 24))
    assert steps_of(run) == [0]
    assert run.core.counters.cancelled == 4 + 3
    assert set(run.where()) == {20, 21, 22, 23}


def test_a_step_that_is_not_kept_open_is_cancelled(run) -> None:
    ask(run, 2, range(8, 12), since=None)
    assert steps_of(run) == [2]
    assert run.core.counters.cancelled == 8


def test_the_gpus_are_recalled_only_for_a_step_that_the_trainer_waits_for(new_run) -> None:
    run = new_run(reserved_instances=1, recall_after_s=3.0, seeding_initial_s=1.0)
    run.publish(0)
    run.reserved("head-0")
    run.spot("a", max_running=8)
    ask(run, 0, range(2), holds=False)
    ask(run, 1, range(2, 6), holds=False)
    run.until(run.now + 2.0)
    for number in [number for number, holder in run.where().items() if holder == "head-0"]:
        run.release(number, 3)
    run.slept("head-0")
    assert run.core.lease is LeaseState.TRAINER
    run.finish(0)
    run.finish(1)
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.RESET))
    commands = run.until(run.now + 5.0)
    assert not any(isinstance(c, RecallLease) for c in commands), "all of step 0 is there: it is trained"
    commands = run.send(StepTrained(run.now, 0, 0.0, 1.0)) + run.until(run.now + 5.0)
    assert any(isinstance(c, RecallLease) for c in commands), "step 1 is waited for, and nobody serves"


def test_a_trainer_that_reconnects_with_the_gpus_gives_them_back_for_the_step_that_it_waits_for(
    new_run,
) -> None:
    run = new_run(reserved_instances=1, recall_after_s=3.0, seeding_initial_s=1.0)
    run.publish(0)
    run.reserved("head-0")
    run.spot("a", max_running=8)
    ask(run, 0, range(2), holds=False)
    ask(run, 1, range(2, 6), holds=False)
    run.until(run.now + 2.0)
    for number in [number for number, holder in run.where().items() if holder == "head-0"]:
        run.release(number, 3)
    run.slept("head-0")
    assert run.core.lease is LeaseState.TRAINER
    ask(run, 0, range(2))
    ask(run, 1, range(2, 6))
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.RESET))
    assert any(isinstance(c, RecallLease) for c in run.until(run.now + 5.0))


def test_lengths_are_learned_once_a_step_is_over(run) -> None:
    for number in range(4):
        run.finish(number, 50)
    run.finish(4, 1)
    run.publish(1)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert run.core._work.lengths.expected(0) == pytest.approx(50)
