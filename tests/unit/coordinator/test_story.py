"""Events of the core told in words: calm, complete and once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.observers.timeline import Timeline
from rlboost_runtime.coordinator.status import shown_state
from rlboost_runtime.core.base.messages import (
    Command,
    Disconnected,
    Event,
    InstanceLeft,
    LaunchFailed,
    LossCause,
    MachineGone,
    NoticeReceived,
    StepTrained,
)
from rlboost_runtime.core.lease_controller import LeaseState


class Clock:
    """Stands still."""

    def now(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1000.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the story never waits")


class Told:
    """A run driven by hand, and its story so far."""

    def __init__(self, run: Any, folder: Path) -> None:
        self.run = run
        self.books = Ledger(folder / "ledger.sqlite")
        self.timeline = Timeline(self.books, Clock(), run.core)
        handle = run.core.handle

        def told(event: Event) -> list[Command]:
            commands: list[Command] = handle(event)
            self.timeline.observe(event, commands, run.core)
            return commands

        run.core.handle = told

    def lines(self) -> list[str]:
        """What was told since the last look."""
        seen, self._seen = getattr(self, "_seen", 0), len(self.books.events())
        return [event.text for event in self.books.events()[seen:]]


@pytest.fixture
def told(new_run: Callable[..., Any], tmp_path: Path) -> Any:
    timeline = Told(new_run(max_spot_instances=3), tmp_path)
    yield timeline
    timeline.books.close()


def rolling_out(told: Told, size: int = 6) -> Any:
    """Three machines of the fleet serve, and a step is under way."""
    run = told.run
    machines = sorted(run.core.machines)
    for machine in machines:
        run.launched(machine)
        run.join(f"{machine}/0", machine=machine)
    run.publish(0)
    for machine in machines:
        run.ready(f"{machine}/0")
    run.step(groups=size, size=1)
    return run


def test_arrivals_are_told_once(told: Told) -> None:
    rolling_out(told)
    lines = told.lines()
    assert [line for line in lines if line.startswith("spot-0 ")] == [
        "spot-0 joined",
        "spot-0 serves policy version 0",
    ]
    assert "policy version 0 published" in lines
    told.run.ready("spot-0/0")
    assert told.lines() == []


def test_a_killed_machine_is_two_lines_whoever_reports_it(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    held = len(run.core.responses_on("spot-1/0"))
    assert held == 2
    run.send(Disconnected(run.now, "spot-1/0", run.epoch("spot-1/0")))
    assert told.lines() == [], "it may come back within the grace"
    run.send(MachineGone(run.now, "spot-1"))
    lines = [line for line in told.lines() if "spot-1" in line]
    assert lines == [
        "spot-1 was preempted; moving its 2 responses",
        "2 responses of spot-1 migrated to spot-0 (1) and spot-2 (1)",
    ]
    run.until(run.now + 5, beating=("spot-0/0", "spot-2/0"))
    assert not [line for line in told.lines() if "spot-1" in line]


def test_a_reset_without_word_from_the_cloud_is_told_after_the_grace(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    run.send(Disconnected(run.now, "spot-1/0", run.epoch("spot-1/0")))
    run.until(run.now + 1)
    assert told.lines()[0] == "spot-1 was preempted: connection reset; moving its 2 responses"
    run.send(MachineGone(run.now, "spot-1"))
    assert not [line for line in told.lines() if "spot-1" in line]


def test_silence_is_the_same_word_as_a_reset(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    run.until(run.now + 120, beating=("spot-0/0", "spot-2/0"))
    (line,) = [line for line in told.lines() if line.startswith("spot-1 ")]
    assert line == "spot-1 was preempted: no heartbeat; moving its 2 responses"


def test_a_gpu_on_which_the_trainer_works_is_not_asleep() -> None:
    for lease in (LeaseState.TRAINER, LeaseState.RECALLING):
        assert shown_state("asleep", lease, 1) == "training"
        assert shown_state("ready", lease, 1) == "ready"
    assert shown_state("asleep", LeaseState.CLOSING, 1) == "asleep"


def test_an_engine_without_a_version_to_load_waits() -> None:
    assert shown_state("loading", LeaseState.TRAINER, None) == "waiting"
    assert shown_state("loading", LeaseState.TRAINER, 0) == "loading"


def test_a_notice_a_migration_and_a_goodbye(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    epoch = run.epoch("spot-2/0")
    mine = run.core.responses_on("spot-2/0")
    run.send(NoticeReceived(run.now, "spot-2/0", epoch, 30.0))
    assert told.lines() == ["spot-2 has 30 s of notice; moving its 2 responses"]
    run.release(mine[0])
    assert told.lines() == [], "one of two is still to come"
    run.release(mine[1])
    (moved,) = told.lines()
    assert moved.startswith("2 responses of spot-2 migrated to ")
    run.send(InstanceLeft(run.now, "spot-2/0", epoch, LossCause.NOTICED))
    assert told.lines() == ["spot-2 was preempted, as announced"]
    run.send(MachineGone(run.now, "spot-2"))
    assert told.lines() == []


def test_a_notice_without_a_time_shows_none(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    run.send(NoticeReceived(run.now, "spot-2/0", run.epoch("spot-2/0"), 30.0, is_assumed=True))
    assert told.lines() == ["spot-2 has a preemption notice; moving its 2 responses"]


def test_what_finishes_before_it_moves_did_not_migrate(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    for response in run.core.responses_on("spot-2/0"):
        if response != run.core.responses_on("spot-2/0")[-1]:
            continue
        run.finish(response)
    run.send(NoticeReceived(run.now, "spot-2/0", run.epoch("spot-2/0"), 5.0))
    assert told.lines() == ["spot-2 has 5 s of notice; moving its 1 response"]
    (last,) = run.core.responses_on("spot-2/0")
    run.finish(last)
    assert not [line for line in told.lines() if "migrated" in line]


def test_no_capacity_is_told_once_per_step(told: Told) -> None:
    run = told.run
    for machine in sorted(run.core.machines)[:2]:
        run.send(LaunchFailed(run.now, machine, "none to be had", 1.0))
    assert told.lines() == ["no spot capacity, retrying: none to be had"]


def test_a_step_is_told_with_the_version_that_it_was_trained_from(told: Told) -> None:
    run = rolling_out(told, size=1)
    told.lines()
    run.finish(0)
    run.publish(1)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert "step 1 trained from policy version 0" in told.lines()


def test_a_step_keeps_its_version_when_the_next_one_starts_before_it_is_trained(told: Told) -> None:
    run = rolling_out(told, size=1)
    run.finish(0)
    run.publish(1)
    run.step(1, 1, ahead=True)
    told.lines()
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    assert "step 1 trained from policy version 0" in told.lines()


def test_a_restarted_coordinator_knows_the_version_of_the_open_step(told: Told, tmp_path: Path) -> None:
    run = rolling_out(told, size=1)
    told.lines()
    again = Timeline(told.books, Clock(), run.core)
    again.observe(StepTrained(run.now, 0, 0.0, 1.0), [], run.core)
    assert told.lines() == ["step 1 trained from policy version 0"]


def test_nothing_is_told_of_the_winding_up(told: Told) -> None:
    run = rolling_out(told)
    told.lines()
    told.timeline.end()
    run.send(MachineGone(run.now, "spot-1"))
    assert told.lines() == []
