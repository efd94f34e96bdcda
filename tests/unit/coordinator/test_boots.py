"""How machines came into service: phases that follow one another and add up to the whole."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from rlboost_cli.views.run_view import PHASES
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.observers.boot_times import BootTimes
from rlboost_runtime.core.base.state_machine import StateMachine
from rlboost_runtime.core.state.machines import LEGAL, Machine, MachineState
from rlboost_runtime.protocol.messages import SCHEMA, AgentHello, InstanceReadyMessage


def machine(name: str = "spot-1", launched_at: float | None = 14.0) -> Machine:
    found = Machine(name, 1, StateMachine(name, MachineState.REQUESTED, LEGAL, 10.0))
    if launched_at is not None:
        found.lifecycle.move(MachineState.LAUNCHED, "launch accepted", launched_at)
        found.was_accepted = True
    return found


def hello(name: str = "spot-1", install_s: dict[str, float] | None = None, age_s: float = 2.0) -> AgentHello:
    phases = {"uv": 1.0, "requirements": 29.0} if install_s is None else install_s
    return AgentHello(
        SCHEMA,
        "run",
        f"{name}/0",
        name,
        "spot",
        4,
        1024,
        "transformers",
        install_s=phases,
        age_s=age_s,
    )


def sent_by(instances: list[str]) -> tuple[Any, Any]:
    """Return a batch of one frame with tokens from each instance, and what was accepted of it."""
    return [(SimpleNamespace(instance=i), SimpleNamespace(counts=b"\1\0")) for i in instances], None


def test_each_phase_has_its_time_and_together_they_are_the_whole():
    machines = {"spot-1": machine()}
    boot_times = BootTimes(lambda: machines)
    assert boot_times.phases("spot-1") == {"request": 4.0}
    boot_times.joined(hello(), 64.0)
    boot_times.load_sent("spot-1", 66.0)
    boot_times.ready("spot-1/0", "spot-1", InstanceReadyMessage(0, pull_s=3.0), 74.0)
    assert list(boot_times.phases("spot-1")) == list(PHASES[:-1])
    boot_times.observe_tokens(*sent_by(["spot-9/0", "spot-1/0"]), 75.5)
    machines.clear()  # the core forgets what is gone
    phases = boot_times.phases("spot-1")
    assert phases == {
        "request": 4.0, "boot": 18.0, "install": 30.0, "dial_in": 2.0,
        "wait": 2.0, "weights": 3.0, "engine": 5.0, "first_token": 1.5,
    }  # fmt: skip
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == pytest.approx(75.5 - 10.0)


def test_a_version_that_was_there_before_the_machine_is_not_waited_for():
    boot_times = BootTimes(lambda: {"spot-1": machine()})
    boot_times.load_sent("spot-1", 64.0)  # the core answers a registration at once
    boot_times.joined(hello(), 64.0)
    boot_times.load_sent("spot-1", 90.0)
    boot_times.ready("spot-1/0", "spot-1", InstanceReadyMessage(0, pull_s=3.0), 74.0)
    assert boot_times.phases("spot-1") | {"wait": 0.0, "weights": 3.0, "engine": 7.0} == boot_times.phases(
        "spot-1"
    )


def test_what_comes_later_changes_nothing():
    boot_times = BootTimes(lambda: {"spot-1": machine()})
    boot_times.joined(hello(), 64.0)
    boot_times.load_sent("spot-1", 64.0)
    boot_times.ready("spot-1/0", "spot-1", InstanceReadyMessage(0, pull_s=3.0), 74.0)
    boot_times.observe_tokens(*sent_by(["spot-1/0"]), 75.0)
    before = boot_times.phases("spot-1")
    boot_times.joined(hello(age_s=900.0), 100.0)
    boot_times.load_sent("spot-1", 101.0)
    boot_times.ready("spot-1/0", "spot-1", InstanceReadyMessage(1, pull_s=1.0), 110.0)
    boot_times.ready("spot-1/1", "spot-1", InstanceReadyMessage(1, pull_s=1.0), 111.0)
    boot_times.observe_tokens(*sent_by(["spot-1/0", "spot-1/1"]), 120.0)
    assert boot_times.phases("spot-1") == before


def test_a_machine_that_says_more_than_there_was_time_for_is_believed_as_far_as_it_can_be():
    boot_times = BootTimes(lambda: {"spot-1": machine()})
    boot_times.joined(hello(install_s={"wheel": 500.0}, age_s=700.0), 64.0)
    assert boot_times.phases("spot-1") == {"request": 4.0, "boot": 0.0, "install": 0.0, "dial_in": 50.0}
    boot_times.ready("spot-1/0", "spot-1", InstanceReadyMessage(0, pull_s=30.0), 70.0)
    assert boot_times.phases("spot-1") | {"wait": 0.0, "weights": 6.0, "engine": 0.0} == boot_times.phases(
        "spot-1"
    )


def test_a_machine_that_nobody_has_given_yet_and_one_that_nobody_knows_have_no_phases():
    boot_times = BootTimes(lambda: {"spot-1": machine(launched_at=None)})
    boot_times.joined(hello("spot-7"), 64.0)
    assert boot_times.phases("spot-1") == {}
    assert boot_times.phases("spot-7") == {}


def test_a_coordinator_that_is_started_again_goes_on_with_every_boot(tmp_path):
    books = tmp_path / "ledger.sqlite"
    before = BootTimes(lambda: {"spot-1": machine(), "spot-2": machine("spot-2")})
    for name in ("spot-1", "spot-2"):
        before.load_sent(name, 64.0)
        before.joined(hello(name), 64.0)
    before.ready("spot-1/0", "spot-1", InstanceReadyMessage(0, pull_s=3.0), 74.0)
    ledger = Ledger(books)
    before.keep(ledger)
    assert all('"told_at":64.0' in kept for kept in ledger.kept_boots().values()), (
        "as earlier ledgers have it"
    )
    ledger.close()  # and everything in memory is lost

    ledger = Ledger(books)
    after = BootTimes(dict)  # the core has forgotten both
    after.recall(ledger)
    assert after.phases("spot-1") == before.phases("spot-1")
    after.observe_tokens(*sent_by(["spot-1/0"]), 75.5)
    after.load_sent("spot-2", 80.0)  # told again, since its connection is new
    after.ready("spot-2/0", "spot-2", InstanceReadyMessage(0, pull_s=3.0), 84.0)
    assert tuple(after.phases("spot-1")) == PHASES
    assert after.phases("spot-2")["wait"] == 0.0
    after.keep(ledger)
    third = BootTimes(dict)
    third.recall(ledger)
    assert third.phases("spot-1") == after.phases("spot-1")
    assert third.phases("spot-2") == after.phases("spot-2")
    ledger.close()


def test_what_could_not_be_kept_is_kept_the_next_time(tmp_path):
    boot_times = BootTimes(lambda: {"spot-1": machine()})
    boot_times.joined(hello(), 64.0)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("CREATE TRIGGER full BEFORE INSERT ON boots BEGIN SELECT RAISE(FAIL, 'full'); END")
    boot_times.keep(ledger)
    assert ledger.kept_boots() == {}
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        other.execute("DROP TRIGGER full")
    other.close()
    boot_times.keep(ledger)
    assert list(ledger.kept_boots()) == ["spot-1"]
    ledger.close()
