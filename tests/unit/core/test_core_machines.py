from __future__ import annotations

import pytest

from rlboost_runtime.core.base.messages import (
    CoordinatorRestarted,
    Disconnected,
    Evict,
    InstanceLeft,
    LaunchFailed,
    LaunchMachine,
    LossCause,
    MachineGone,
    MachineLaunched,
    NoticeReceived,
    RunEnding,
    StepTrained,
    TerminateMachine,
)
from rlboost_runtime.core.state.machines import FORGET_AFTER_S, REJOIN_S, MachineState, first_free_number


def launches(commands) -> list[str]:
    return [c.machine for c in commands if isinstance(c, LaunchMachine)]


def ends(commands) -> list[str]:
    return [c.machine for c in commands if isinstance(c, TerminateMachine)]


def up(run, machine: str, *names: str) -> None:
    run.launched(machine)
    for name in names:
        run.join(name, machine=machine)
        run.ready(name)


def test_a_run_asks_for_its_machines_at_once(new_run) -> None:
    assert launches(new_run(max_spot_instances=3).commands) == ["spot-0", "spot-1", "spot-2"]
    assert launches(new_run(max_spot_instances=5, instances_per_machine=2).commands) == [
        "spot-0",
        "spot-1",
        "spot-2",
    ]
    assert new_run(max_spot_instances=0).commands == []


def test_a_failed_launch_waits_as_told_and_gets_a_new_name(new_run) -> None:
    run = new_run(max_spot_instances=1)
    assert run.send(LaunchFailed(1.0, "spot-0", "no capacity", 4.0)) == []
    assert run.core.next_deadline() == 5.0
    run.now = 1.0
    assert run.until(4.5) == []
    assert launches(run.until(5.0)) == ["spot-1"]


def test_a_stock_out_of_days_leaves_nothing_behind_but_the_number(new_run) -> None:
    run = new_run(max_spot_instances=1)
    for number in range(50):
        run.send(LaunchFailed(run.now, f"spot-{number}", "no capacity", 2.0))
        assert launches(run.until(run.now + 2.0)) == [f"spot-{number + 1}"]
    assert list(run.core.machines) == ["spot-50"]


def test_a_machine_that_went_long_ago_is_forgotten_and_its_number_is_not_given_again(new_run) -> None:
    run = new_run(max_spot_instances=1)
    up(run, "spot-0", "a")
    assert launches(run.send(MachineGone(0.0, "spot-0"))) == ["spot-1"]
    up(run, "spot-1", "b")
    run.until(FORGET_AFTER_S - 1.0)
    assert launches(run.send(MachineGone(run.now, "spot-1"))) == ["spot-2"]
    assert list(run.core.machines) == ["spot-0", "spot-1", "spot-2"]
    up(run, "spot-2", "c")
    run.until(FORGET_AFTER_S)
    assert launches(run.send(MachineGone(run.now, "spot-2"))) == ["spot-3"]
    assert list(run.core.machines) == ["spot-1", "spot-2", "spot-3"]
    assert run.send(MachineGone(run.now, "spot-0")) == []
    assert ends(run.launched("spot-0")) == ["spot-0"], "a forgotten one that exists after all"
    run.send(MachineGone(run.now, "spot-0"))
    assert launches(run.commands) == ["spot-0", "spot-1", "spot-2", "spot-3"]


def test_a_gone_machine_with_a_living_instance_is_not_forgotten(new_run) -> None:
    run = new_run(max_spot_instances=2)
    up(run, "spot-0", "a")
    up(run, "spot-1", "b")
    run.send(MachineGone(0.0, "spot-0"))
    run.join("a", machine="spot-0")
    run.until(FORGET_AFTER_S)
    run.send(MachineGone(run.now, "spot-1"))
    assert "spot-0" in run.core.machines


@pytest.mark.parametrize("name", ["spot-7", "spot--1", "spot-01", "spot-", "by-hand", "spot-²"])
def test_a_launch_that_this_run_never_asked_for_means_nothing(new_run, name: str) -> None:
    run = new_run(max_spot_instances=2)
    assert run.launched(name) == []
    assert run.core.counters.stale_events == 1


def test_a_machine_that_nobody_dials_in_from_is_ended_and_replaced(new_run) -> None:
    run = new_run(max_spot_instances=1, boot_deadline_s=20.0)
    run.until(10.0)
    run.launched("spot-0")
    assert run.until(29.5) == []
    commands = run.until(30.0)
    assert commands == [
        TerminateMachine("spot-0", "no agent dialled in within 20 s"),
        LaunchMachine("spot-1"),
    ]


def test_a_termination_is_asked_for_until_the_provider_says_gone(new_run) -> None:
    run = new_run(max_spot_instances=1)
    up(run, "spot-0", "a")
    assert ends(run.send(InstanceLeft(0.0, "a", 1, LossCause.STOPPED))) == ["spot-0"]
    assert ends(run.until(16.0)) == ["spot-0", "spot-0", "spot-0"]
    run.send(MachineGone(16.0, "spot-0"))
    assert ends(run.until(60.0)) == []


def test_a_machine_that_lost_one_of_two_instances_stays(new_run) -> None:
    run = new_run(max_spot_instances=2, instances_per_machine=2)
    up(run, "spot-0", "a", "b")
    assert run.send(InstanceLeft(0.0, "a", 1, LossCause.STOPPED)) == []
    assert ends(run.send(InstanceLeft(0.0, "b", 2, LossCause.STOPPED))) == ["spot-0"]


@pytest.mark.parametrize("cause", [LossCause.RESET, LossCause.SILENT])
def test_a_machine_whose_last_instance_may_come_back_is_ended_only_if_it_does_not(new_run, cause) -> None:
    run = new_run(max_spot_instances=1)
    up(run, "spot-0", "a")
    if cause is LossCause.RESET:
        run.send(Disconnected(0.0, "a", 1))
    lost_at = run.core.next_deadline()
    run.until(lost_at, beating=())
    assert run.core.counters.losses == {cause: 1}
    assert run.until(lost_at + REJOIN_S - 0.5) == [], "neither ended nor replaced"
    assert run.until(lost_at + REJOIN_S) == [
        TerminateMachine("spot-0", "its last instance is lost and did not come back in 10 s"),
        LaunchMachine("spot-1"),
    ]


def test_an_instance_dropped_by_mistake_registers_again_and_keeps_its_machine(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.publish()
    up(run, "spot-0", "a")
    run.until(7.0, beating=())
    assert "a" not in run.core.instances
    run.join("a", machine="spot-0")
    run.ready("a")
    assert ends(run.until(60.0)) == []
    assert run.assigned(run.step()) == {0: "a"}


def test_the_wait_for_an_instance_begins_anew_with_a_new_coordinator(new_run) -> None:
    run = new_run(max_spot_instances=1)
    up(run, "spot-0", "a")
    run.until(7.0, beating=())
    run.now = 60.0
    assert run.send(CoordinatorRestarted(60.0)) == []
    assert run.until(69.5) == []
    assert ends(run.until(70.0)) == ["spot-0"]


def test_an_instance_that_hangs_or_leaves_is_not_waited_for(new_run) -> None:
    run = new_run(max_spot_instances=2, hang_after_s=12.0)
    run.publish()
    up(run, "spot-0", "a")
    up(run, "spot-1", "b")
    run.step()
    assert ends(run.until(12.5, stuck=("a",))) == ["spot-0"]
    assert ends(run.send(InstanceLeft(run.now, "b", 2, LossCause.STOPPED))) == ["spot-1"]


def test_a_registration_anew_keeps_the_machine(new_run) -> None:
    run = new_run(max_spot_instances=1)
    up(run, "spot-0", "a")
    assert ends(run.join("a", machine="spot-0")) == []


def test_a_gone_machine_takes_its_instances_along_and_is_replaced(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.publish()
    up(run, "spot-0", "a")
    run.step()
    commands = run.send(MachineGone(2.0, "spot-0"))
    assert commands == [Evict("a", 1, LossCause.MACHINE_GONE), LaunchMachine("spot-1")]
    assert run.where() == {}
    assert run.send(MachineGone(2.0, "spot-0")) == []
    assert run.core.counters.duplicates == 1


def test_a_machine_that_went_while_booting_is_not_replaced_in_a_tight_loop(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.launched("spot-0")
    assert run.send(MachineGone(0.0, "spot-0")) == []
    assert launches(run.until(1.0)) == ["spot-1"]


def test_a_noticed_machine_is_replaced_before_it_goes(new_run) -> None:
    run = new_run(max_spot_instances=1, instances_per_machine=2)
    run.publish()
    up(run, "spot-0", "a", "b")
    run.step(groups=4)
    commands = run.send(NoticeReceived(0.0, "a", 1, 30.0))
    assert launches(commands) == ["spot-1"]
    assert all(i.is_draining for i in run.core.instances.values()), "its sibling goes with it"
    commands = run.send(MachineGone(1.0, "spot-0"))
    assert run.core.counters.losses == {LossCause.NOTICED: 2}
    assert launches(commands) == []


def test_a_notice_that_comes_to_nothing_does_not_leave_a_machine_running(new_run) -> None:
    run = new_run(max_spot_instances=1)
    up(run, "spot-0", "a")
    run.send(NoticeReceived(0.0, "a", 1, 10.0))
    assert ends(run.until(14.5)) == []
    assert ends(run.until(15.0)) == ["spot-0"]


def test_an_agent_may_dial_in_before_the_provider_answers(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.join("a", machine="spot-0")
    assert run.core.machines["spot-0"].state is MachineState.LAUNCHED
    assert run.launched("spot-0") == []


def test_a_launch_that_was_given_up_and_succeeds_is_ended(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.send(LaunchFailed(0.0, "spot-0", "timeout", 60.0))
    assert ends(run.launched("spot-0")) == ["spot-0"]
    run.send(LaunchFailed(0.0, "spot-0", "timeout", 60.0))
    assert run.core.machines["spot-0"].is_alive, "only the provider's report ends it now"


def test_an_agent_of_a_machine_being_ended_gets_no_work(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.publish()
    up(run, "spot-0", "a")
    run.send(InstanceLeft(0.0, "a", 1, LossCause.STOPPED))
    run.join("a", machine="spot-0")
    run.ready("a")
    assert run.assigned(run.step()) == {}
    run.send(Disconnected(0.0, "a", 2))
    run.until(1.0)
    assert run.core.counters.losses[LossCause.STOPPED] == 2


def test_an_ending_run_ends_every_machine_and_launches_none(new_run) -> None:
    run = new_run(max_spot_instances=2)
    up(run, "spot-0", "a")
    assert ends(run.send(RunEnding(0.0, "done"))) == ["spot-0", "spot-1"]
    assert launches(run.send(LaunchFailed(0.0, "spot-1", "cancelled", 0.0))) == []
    assert launches(run.send(MachineGone(0.0, "spot-0"))) == []
    assert ends(run.send(MachineLaunched(0.0, "spot-1"))) == ["spot-1"], "launched all the same"
    assert run.until(4.0) == []


def test_a_restart_asks_again_for_what_was_not_answered(new_run) -> None:
    run = new_run(max_spot_instances=2, boot_deadline_s=20.0)
    run.launched("spot-0")
    assert launches(run.send(CoordinatorRestarted(100.0))) == ["spot-1"]
    run.now = 100.0
    assert run.until(119.5) == [], "nobody could dial in meanwhile: both get their time anew"
    assert ends(run.until(120.0)) == ["spot-0", "spot-1"]


def test_a_name_that_the_books_know_is_not_given_again(new_run) -> None:
    """A power cut may take the launch of spot-3 from the event log, though not from the books."""
    run = new_run(max_spot_instances=1)
    run.launched("spot-0")
    run.now = 100.0
    assert launches(run.send(CoordinatorRestarted(100.0, num_named=4))) == []
    asked = [*launches(run.send(MachineGone(100.0, "spot-0"))), *launches(run.until(110.0))]
    assert asked == ["spot-4"]
    assert first_free_number(["spot-0", "spot-11", "reserved-0", "node-3", "spot-x", "spot-2"]) == 12
    assert first_free_number([]) == 0


def test_superfluous_machines_are_ended_between_steps_after_three_of_them(new_run) -> None:
    run = new_run(max_spot_instances=3, reserved_instances=0)
    run.publish()
    for n in range(3):
        up(run, f"spot-{n}", f"i{n}")
    ended: list[list[str]] = []
    for step in range(4):
        run.step(step)
        run.until(run.now + 1.0)
        run.finish(step)
        trained = run.send(StepTrained(run.now, step, wait_s=0.0, busy_s=3.0))  # one instance would do
        ended.append(ends(trained))
    assert ended == [[], [], ["spot-2", "spot-1"], []]
    assert launches(run.commands) == ["spot-0", "spot-1", "spot-2"]


def test_a_machine_that_came_back_from_the_dead_is_forgotten_after_its_second_end(new_run) -> None:
    run = new_run(max_spot_instances=1)
    run.launched("spot-0")
    run.send(MachineGone(run.now, "spot-0"))
    run.now = FORGET_AFTER_S - 1.0
    assert ends(run.launched("spot-0")) == ["spot-0"], "gone, and accepted after all"
    run.send(MachineGone(run.now, "spot-0"))

    def launch_another(at: float) -> None:
        run.now = at
        newest = list(run.core.machines)[-1]
        run.send(LaunchFailed(run.now, newest, "no capacity", 0.0))

    launch_another(FORGET_AFTER_S + 1.0)
    assert "spot-0" in run.core.machines
    launch_another(2.0 * FORGET_AFTER_S)
    assert "spot-0" not in run.core.machines
