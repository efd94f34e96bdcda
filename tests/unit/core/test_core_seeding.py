from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_runtime.core.base.messages import (
    CoreConfig,
    Disconnected,
    InstanceLeft,
    LossCause,
    Reconnected,
    StepTrained,
)
from rlboost_runtime.core.window.predicted import MOST_LEAD_SHARE, WAIT_SHARE, PredictedWindow
from rlboost_runtime.core.window.seeding_window import (
    CountMeter,
    StepObservation,
    SurplusWatch,
    desired_machines,
    instances_to_keep_up,
    useful_instances,
)
from rlboost_runtime.sim.baselines.windows import Algorithm1Window
from rlboost_runtime.sim.policies import PAPER


def seen(
    n_prem: float, n_hat: int, wait: float, remote_wait: float, train: float = 40.0, remote: float = 60.0
):
    return StepObservation(n_prem, n_hat, wait, remote_wait, train, remote)


def test_algorithm_1_by_hand() -> None:
    seeding = Algorithm1Window(t_seed_s=10.0, eta=3.0, num_reserved=4)
    seeding.learn(seen(2.0, 2, wait=9.0, remote_wait=3.0))
    assert seeding.t_seed_s == 12.0  # 10 + (9 - 3) / 3
    assert seeding.n_prem == (60.0 * 2.0 + 12.0 * 4) / 40.0  # with the new window: 4.2
    assert seeding.memory == {2: 12.0}
    seeding.learn(seen(2.0, 2, wait=0.0, remote_wait=1.5))
    assert seeding.t_seed_s == 11.5
    assert seeding.memory == {2: 11.5}


def test_after_churn_the_window_jumps_to_the_remembered_one() -> None:
    seeding = Algorithm1Window(10.0, 1, 3.0)
    seeding.learn(seen(1.0, 1, wait=30.0, remote_wait=0.0))  # 20 s with one
    seeding.learn(seen(3.0, 3, wait=0.0, remote_wait=45.0))  # 5 s with three
    assert seeding.memory == {1: 20.0, 3: 5.0}
    seeding.learn(seen(2.4, 1, wait=3.0, remote_wait=0.0))  # two of three were lost in this step
    assert seeding.t_seed_s == 20.0
    assert seeding.memory == {1: 20.0, 3: 5.0}, "a step with churn is not remembered"
    seeding.learn(seen(1.5, 2, wait=3.0, remote_wait=0.0))
    assert seeding.t_seed_s == 21.0, "nothing is remembered for two"


def test_where_steps_overlap_the_fleets_own_time_counts() -> None:
    alone = seen(2.0, 2, wait=0.0, remote_wait=0.0)
    assert instances_to_keep_up(alone, 10.0, 4) == (60.0 * 2.0 + 10.0 * 4) / 40.0
    beside = replace(alone, t_fleet=30.0)
    assert instances_to_keep_up(beside, 10.0, 4) == (30.0 * 2.0 + 10.0 * 4) / 40.0


def test_where_steps_overlap_each_wait_of_the_trainer_adds_to_the_lead() -> None:
    window = PredictedWindow(10.0, 4)
    alone = seen(2.0, 2, wait=10.0, remote_wait=0.0, train=40.0)
    window.learn(alone)
    assert window.lead_s == 0.0, "else engines would be idle for it"
    beside = replace(alone, t_fleet=30.0)
    window.learn(beside)
    assert window.lead_s == 10.0 - WAIT_SHARE * 40.0
    window.learn(replace(beside, t_train_wait=500.0))
    assert window.lead_s == MOST_LEAD_SHARE * 40.0
    window.learn(replace(beside, t_train_wait=0.0))
    assert window.lead_s == MOST_LEAD_SHARE * 40.0 - WAIT_SHARE * 40.0
    for _ in range(100):
        window.learn(replace(beside, t_train_wait=0.0))
    assert window.lead_s == 0.0


def test_the_window_never_falls_below_zero() -> None:
    seeding = Algorithm1Window(1.0, 1, 3.0)
    seeding.learn(seen(2.0, 2, wait=0.0, remote_wait=30.0))
    assert seeding.t_seed_s == 0.0
    assert seeding.n_prem == 3.0


def test_a_step_without_spot_instances_teaches_nothing() -> None:
    seeding = Algorithm1Window(10.0, 1, 3.0, memory={0: 99.0})
    seeding.learn(seen(0.0, 0, wait=9.0, remote_wait=0.0))
    assert (seeding.t_seed_s, seeding.n_prem) == (10.0, None)


def test_a_trainer_that_took_no_time_leaves_the_useful_number_alone() -> None:
    seeding = Algorithm1Window(10.0, 1, 3.0)
    seeding.learn(seen(1.0, 1, wait=3.0, remote_wait=0.0, train=0.0))
    assert (seeding.t_seed_s, seeding.n_prem) == (11.0, None)


def test_a_mean_weighs_each_count_by_its_time() -> None:
    meter = CountMeter()
    meter.set(3, 5.0)
    meter.restart(10.0)
    assert meter.mean(10.0) == 3.0
    meter.set(1, 16.0)
    assert meter.mean(20.0) == pytest.approx((3 * 6 + 1 * 4) / 10)


@pytest.mark.parametrize(
    ("n_prem", "useful"), [(None, 6), (0.0, 1), (2.0, 2), (2.1, 3), (2.0 + 1e-12, 2), (9.0, 6)]
)
def test_useful_instances_are_rounded_up_within_the_bounds(n_prem: float | None, useful: int) -> None:
    assert useful_instances(n_prem, CoreConfig(max_spot_instances=6)) == useful


def test_a_job_without_spot_wants_none() -> None:
    assert useful_instances(3.0, CoreConfig(max_spot_instances=0)) == 0


def test_machines_hold_the_useful_instances() -> None:
    config = CoreConfig(max_spot_instances=9, instances_per_machine=4)
    assert [desired_machines(n, config) for n in (0, 1, 4, 5, 9)] == [0, 1, 1, 2, 3]


def test_machines_are_ended_only_after_three_steps_in_a_row_agree() -> None:
    watch = SurplusWatch()
    assert [watch.after_step(2) for _ in range(2)] == [0, 0]
    assert watch.after_step(0) == 0
    assert [watch.after_step(2) for _ in range(3)] == [0, 0, 2]
    assert watch.after_step(0) == 0


def test_the_core_observes_a_step_as_the_paper_does(new_run) -> None:
    run = new_run(
        max_spot_instances=2, reserved_instances=1, seeding_initial_s=4.0, seeding_eta=2.0, policy=PAPER
    )
    run.publish()
    run.reserved()
    run.spot("a", "b")
    run.until(10.0)
    run.step(groups=2)
    run.ready("head-0")
    run.until(30.0)
    run.finish(0)
    run.finish(1)
    run.until(40.0)
    run.send(StepTrained(40.0, 0, wait_s=6.0, busy_s=25.0))
    seeding = run.core.seeding
    # t_remote_wait = 40 - 30 = 10, t_remote = 30 - 10 = 20, two instances throughout
    assert seeding.t_seed_s == 4.0 + (6.0 - 10.0) / 2.0
    assert seeding.n_prem == (20.0 * 2 + 2.0 * 1) / 25.0
    assert seeding.memory == {2: 2.0}
    assert run.core.useful_instances == 2


def test_a_step_with_churn_is_not_remembered(new_run) -> None:
    run = new_run(max_spot_instances=2, reserved_instances=0, seeding_initial_s=4.0, policy=PAPER)
    run.publish()
    run.spot("a", "b")
    run.step()
    run.until(5.0)
    run.send(InstanceLeft(5.0, "b", run.epoch("b"), LossCause.STOPPED))
    run.until(10.0)
    run.finish(0)
    run.send(StepTrained(10.0, 0, wait_s=3.0, busy_s=10.0))
    assert run.core.seeding.n_prem == pytest.approx(10.0 * 1.5 / 10.0)
    assert run.core.seeding.memory == {}
    assert run.core.seeding.t_seed_s == 5.0


def test_a_step_opened_again_teaches_nothing(new_run) -> None:
    run = new_run(max_spot_instances=1, reserved_instances=0)
    run.publish()
    run.spot("a")
    run.step()
    again = run.core.step
    assert again is not None
    run.finish(0)
    run._next_response = 0
    run.step()
    run.send(StepTrained(run.now, 0, wait_s=3.0, busy_s=10.0))
    assert run.core.seeding.n_prem is None


def test_a_passing_reset_is_no_churn(new_run) -> None:
    run = new_run(max_spot_instances=1, reserved_instances=0, reset_grace_s=2.0, policy=PAPER)
    run.publish()
    run.spot("a")
    run.step()
    run.until(4.0)
    run.send(Disconnected(4.0, "a", run.epoch("a")))
    run.send(Reconnected(5.0, "a", run.epoch("a"), tuple(run.core.instances["a"].assignments)))
    run.now = 5.0
    run.until(9.0)
    run.finish(0)
    run.send(StepTrained(9.0, 0, wait_s=0.0, busy_s=9.0))
    assert list(run.core.seeding.memory) == [1]
