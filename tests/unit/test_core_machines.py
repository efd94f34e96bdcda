from __future__ import annotations

from rlboost_runtime.core.machines import MachineState
from rlboost_runtime.core.messages import (
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
    assert not run.core.machines["spot-0"].is_alive


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
    run.send(Disconnected(0.0, "a", 1))
    assert ends(run.until(4.0)) == ["spot-0"]
    assert ends(run.until(16.0)) == ["spot-0", "spot-0", "spot-0"]
    run.send(MachineGone(16.0, "spot-0"))
    assert ends(run.until(60.0)) == []


def test_a_machine_that_lost_one_of_two_instances_stays(new_run) -> None:
    run = new_run(max_spot_instances=2, instances_per_machine=2)
    up(run, "spot-0", "a", "b")
    assert run.send(InstanceLeft(0.0, "a", 1, LossCause.STOPPED)) == []
    assert ends(run.send(InstanceLeft(0.0, "b", 2, LossCause.STOPPED))) == ["spot-0"]


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
    assert run.core.machines["spot-0"].is_alive, "only the provider's word ends it now"


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
