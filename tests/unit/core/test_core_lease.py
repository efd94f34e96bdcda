from __future__ import annotations

import pytest

from rlboost_runtime.core.base.messages import (
    Abort,
    CoordinatorRestarted,
    DeliverGroup,
    Disconnected,
    Evict,
    GrantLease,
    InstanceLeft,
    LeaseReturned,
    LoadVersion,
    LossCause,
    Pool,
    RecallLease,
    Reconnected,
    Sleep,
    StepTrained,
    TrainerLost,
    Wake,
)
from rlboost_runtime.core.lease_controller import LeaseState


@pytest.fixture
def run(new_run):
    """One reserved instance asleep, version 0 published, a window of 10 s."""
    run = new_run(reserved_instances=1, seeding_initial_s=10.0)
    run.publish()
    run.reserved()
    return run


def kinds(commands) -> list[type]:
    return [type(c) for c in commands]


def test_a_reserved_instance_is_put_to_sleep_before_anything_else(new_run) -> None:
    run = new_run(reserved_instances=1)
    run.publish()
    assert kinds(run.join("head-0", Pool.RESERVED, machine="head")) == [Sleep, LoadVersion]


def test_a_step_wakes_the_reserved_instances_and_they_get_work(run) -> None:
    assert Wake("head-0", 1) in run.step(groups=2)
    assert run.core.lease is LeaseState.ENGINES
    assert run.assigned(run.ready("head-0")) == {0: "head-0", 1: "head-0"}


def test_without_reserved_instances_the_trainer_gets_the_gpu_at_once(new_run) -> None:
    run = new_run(reserved_instances=0)
    run.publish()
    assert GrantLease(0) in run.step()
    assert run.core.lease is LeaseState.TRAINER


def test_the_window_closes_after_t_seed_once_a_spot_instance_serves(run) -> None:
    run.spot("a", max_running=1)
    run.step(groups=4)
    run.ready("head-0")
    assert run.core.next_deadline() is not None
    run.until(9.5)
    assert run.core.lease is LeaseState.ENGINES
    commands = run.until(10.0)
    assert kinds(commands) == [Abort, Abort, Abort], "first its work is taken back"
    assert run.core.lease is LeaseState.CLOSING
    held = [r for r, name in run.where().items() if name == "head-0"]
    assert run.release(held[0]) == []
    assert run.release(held[1]) == []
    assert kinds(run.release(held[2])) == [Sleep], "asleep only when empty"
    assert run.slept("head-0") == [GrantLease(0)]
    assert run.core.lease is LeaseState.TRAINER
    assert set(run.where().values()) == {"a"}


def test_with_no_spot_instance_the_window_stays_open_to_the_end(run) -> None:
    run.step(groups=2)
    run.ready("head-0")
    run.until(100.0)
    assert run.core.lease is LeaseState.ENGINES
    run.finish(0)
    assert kinds(run.finish(1)) == [DeliverGroup, Sleep]
    assert run.slept("head-0") == [GrantLease(0)]


def test_a_spot_instance_that_comes_late_closes_an_overdue_window(run) -> None:
    run.step()
    run.ready("head-0")
    run.until(20.0)
    run.join("a")
    assert run.core.lease is LeaseState.ENGINES, "it serves nothing yet"
    assert kinds(run.ready("a")) == [Abort]


def test_a_window_without_length_does_not_even_wake_the_engine(new_run) -> None:
    run = new_run(reserved_instances=1, seeding_initial_s=0.0)
    run.publish()
    run.reserved()
    run.spot("a")
    commands = run.step()
    assert GrantLease(0) in commands
    assert Wake not in kinds(commands)


def test_a_lost_reserved_instance_never_blocks_the_hand_over(run) -> None:
    run.spot("a")
    run.step(groups=9)
    run.ready("head-0")
    run.until(10.0)
    assert run.core.lease is LeaseState.CLOSING
    run.send(Disconnected(run.now, "head-0", run.epoch("head-0")))
    assert run.core.lease is LeaseState.CLOSING, "it may come back, and its memory is not free"
    assert GrantLease(0) in run.until(11.0)


def test_an_engine_that_does_not_answer_a_sleep_is_given_up(new_run) -> None:
    run = new_run(reserved_instances=1, hang_after_s=5.0)
    run.publish()
    run.reserved()
    run.step()
    run.ready("head-0")
    run.finish(0)
    assert run.core.lease is LeaseState.CLOSING
    commands = run.until(6.0)
    assert kinds(commands) == [Evict, GrantLease]
    assert run.core.counters.losses[LossCause.HUNG] == 1


def test_the_gpu_is_recalled_when_nobody_else_serves(run) -> None:
    run.spot("a")
    run.step(groups=2)
    run.ready("head-0")
    run.until(10.0)
    for response in [r for r, name in run.where().items() if name == "head-0"]:
        run.release(response)
    run.slept("head-0")
    assert run.core.lease is LeaseState.TRAINER
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.NOTICED))
    assert RecallLease not in kinds(run.until(12.5)), "recall_after_s is 3"
    assert kinds(run.until(13.0)) == [RecallLease]
    assert run.core.lease is LeaseState.RECALLING
    assert RecallLease not in kinds(run.until(30.0)), "asked once"
    assert kinds(run.send(LeaseReturned(30.0))) == [Wake]
    assert len(run.assigned(run.ready("head-0"))) == 2
    run.until(35.0)
    run.spot("b")
    run.until(39.5)
    assert run.core.lease is LeaseState.ENGINES, "the window lasts T_seed again"
    run.until(40.0)
    assert run.core.lease is LeaseState.CLOSING


def test_a_spot_instance_in_time_prevents_the_recall(run) -> None:
    run.spot("a")
    run.step(groups=1)
    run.until(10.0)
    run.slept("head-0")
    assert run.core.lease is LeaseState.TRAINER
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.NOTICED))
    run.until(12.0)
    run.spot("b")
    assert RecallLease not in kinds(run.until(30.0))
    assert run.core.next_deadline() is not None


def test_a_wake_waits_for_the_answer_to_the_sleep(run) -> None:
    run.step()
    run.ready("head-0")
    run.finish(0)
    assert run.core.lease is LeaseState.CLOSING
    assert Wake not in kinds(run.step(1)), "a Sleep is out"
    assert kinds(run.slept("head-0")) == [Wake]
    assert run.core.lease is LeaseState.ENGINES


def test_a_second_word_of_sleep_does_not_count_for_the_next_order(run) -> None:
    run.step()
    run.ready("head-0")
    assert run.slept("head-0") == []
    assert run.core.counters.stale_events == 1
    run.finish(0)
    assert run.core.lease is LeaseState.CLOSING


def test_an_instance_that_proves_a_version_while_told_to_sleep_serves_nothing(run) -> None:
    run.step()
    run.ready("head-0")
    run.finish(0)
    run.ready("head-0")
    assert run.core.instances["head-0"].version is None
    assert run.slept("head-0") == [GrantLease(0)]


def test_a_restarted_trainer_gets_everything_again_and_lends_the_gpu(run) -> None:
    run.step(groups=3)
    run.ready("head-0")
    run.finish(1)
    run.finish(0)
    run.send(TrainerLost(run.now))
    run._next_response = 0
    commands = run.step(groups=3)
    assert commands == [DeliverGroup(0, 1), DeliverGroup(0, 0)]
    assert run.where() == {2: "head-0"}, "what runs goes on"
    run.finish(2)
    run.slept("head-0")
    run._next_response = 0
    commands = run.step(groups=3)
    assert commands == [DeliverGroup(0, 1), DeliverGroup(0, 0), DeliverGroup(0, 2), GrantLease(0)]


def test_an_answer_to_no_recall_is_stale(run) -> None:
    assert run.send(LeaseReturned(0.0)) == []
    assert run.core.lease is LeaseState.TRAINER
    assert run.core.counters.stale_events == 1


def test_orders_are_repeated_to_an_instance_that_comes_back(run) -> None:
    run.step()
    run.send(Disconnected(run.now, "head-0", 1))
    assert Wake("head-0", 1) in run.send(Reconnected(run.now, "head-0", 1, ()))
    run.ready("head-0")
    run.finish(0)
    run.send(Disconnected(run.now, "head-0", 1))
    assert Sleep("head-0", 1) in run.send(Reconnected(run.now, "head-0", 1, ()))
    assert run.slept("head-0") == [GrantLease(0)]


def test_a_restarted_coordinator_gives_everybody_a_fresh_lease(run) -> None:
    run.spot("a")
    run.step(groups=2)
    run.until(3.0)
    run.send(CoordinatorRestarted(50.0))
    run.now = 50.0
    assert run.until(55.5) == []
    back = run.core.instances["a"]
    assert run.send(Reconnected(55.5, "a", back.epoch, tuple(back.assignments))) == []
    run.until(57.0, beating=("a",))
    assert list(run.core.instances) == ["a"]
    assert run.core.counters.losses == {LossCause.SILENT: 1}


def test_a_step_asked_for_ahead_leaves_the_gpu_with_the_trainer(new_run) -> None:
    run = new_run(reserved_instances=1, seeding_initial_s=0.0)
    run.publish()
    run.reserved()
    run.spot("a")
    assert GrantLease(0) in run.step()
    run.finish(0)
    commands = run.step(1, groups=2, ahead=True)
    assert run.core.lease is LeaseState.TRAINER
    assert not {GrantLease, RecallLease, Wake} & set(kinds(commands))
    assert run.assigned(commands) == {1: "a", 2: "a"}, "spot instances work on while step 0 is trained"
    stale = run.core.counters.stale_events
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert run.core.counters.stale_events == stale
    assert run.core.step.step == 1
    assert not run.core.step.trained


def one_step_ahead(new_run):
    """A spot instance rolls out step 1 while the trainer, who has the GPUs, trains step 0."""
    run = new_run(reserved_instances=1, seeding_initial_s=0.0)
    run.publish()
    run.reserved()
    run.spot("a")
    run.step()
    run.finish(0)
    run.step(1, ahead=True)
    return run


def test_a_trainer_with_an_earlier_step_to_train_keeps_the_gpu_without_spot_instances(new_run) -> None:
    run = one_step_ahead(new_run)
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.MACHINE_GONE))
    assert RecallLease(1) not in run.until(run.now + 2 * run.core.config.recall_after_s)
    assert RecallLease(1) in run.send(StepTrained(run.now, 0, 0.0, 1.0)), "it would wait from now on"


def test_reserved_engines_help_with_a_step_asked_for_ahead_once_the_one_before_is_trained(new_run) -> None:
    run = new_run(reserved_instances=1, seeding_initial_s=20.0)
    run.publish()
    run.reserved()
    run.spot("a", max_running=1)
    run.step()
    run.until(25.0)
    run.finish(0)
    run.slept("head-0")
    run.step(1, groups=3, ahead=True)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    opened = run.now
    assert Wake("head-0", 1) in run.send(LeaseReturned(run.now))
    assert run.assigned(run.ready("head-0")), "it has a part of the step"
    run.until(opened + 19.0)
    assert run.core.lease is LeaseState.ENGINES
    run.until(opened + 21.0)
    assert run.core.lease is not LeaseState.ENGINES, "the window is over"


def test_no_window_is_opened_for_a_step_that_is_finished(new_run) -> None:
    run = one_step_ahead(new_run)
    run.finish(1)
    assert run.send(StepTrained(run.now, 0, 0.0, 1.0)) == []


def test_a_recall_that_crosses_a_step_asked_for_ahead_is_said_again(new_run) -> None:
    run = one_step_ahead(new_run)
    assert RecallLease(1) in run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert run.core.lease is LeaseState.RECALLING
    run.send(InstanceLeft(run.now, "a", run.epoch("a"), LossCause.MACHINE_GONE))
    assert RecallLease(2) in run.step(2, ahead=True), "the trainer takes recalls of its present step only"
    assert Wake("head-0", 1) in run.send(LeaseReturned(run.now))
    assert run.core.lease is LeaseState.ENGINES
