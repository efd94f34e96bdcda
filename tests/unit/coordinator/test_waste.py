"""What billed time was good for, metered over a real core that is driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.totals import RunTotals
from rlboost_runtime.coordinator.observers.waste import WasteMeter
from rlboost_runtime.core.base.messages import Disconnected, LossCause, MachineGone, Pool, StepTrained
from rlboost_runtime.run.reserved import RESERVED_MACHINE

T0 = 1_800_000_000.0


@dataclass
class Metered:
    """A core, its books and a meter that observes everything."""

    run: Any
    ledger: Ledger
    totals: RunTotals = field(default_factory=RunTotals)

    def __post_init__(self) -> None:
        self.meter = self.new_meter()
        send = self.run.send

        def heard(event: Any) -> Any:
            commands = send(event)
            self.totals.observe(event, commands, self.run.core)
            self.meter.observe(event, commands, self.run.core)
            return commands

        self.run.send = heard

    def new_meter(self) -> WasteMeter:
        return WasteMeter(self.ledger, self.run.core, self.totals)

    def buy(self, machine: str, pool: str = "spot") -> None:
        self.ledger.intend(MachineRecord(
            machine, pool=pool, provider="local", zone="here", accelerator="cpu",
            price_micro_usd_per_hour=3_600_000_000, price_source="test", intended_at=T0 + self.run.now,
        ))  # fmt: skip
        self.ledger.launched(machine, T0 + self.run.now)
        if pool == "spot":
            self.run.launched(machine)

    def at(self, now: float) -> None:
        """Let time pass, looked at as often as the coordinator does."""
        while self.run.now < now:
            self.run.until(min(now, self.run.now + 1.0))
            self.meter.advance(self.run.now)

    def tokens(self, name: str, *responses: int) -> None:
        """Tokens come from an instance; the first ones of `responses`."""
        batch = [(SimpleNamespace(instance=name), SimpleNamespace(counts=b"\1\0"))]
        openings = tuple((response, 0, name) for response in responses)
        self.meter.observe_tokens(batch, SimpleNamespace(openings=openings), self.run.now)  # type: ignore[arg-type]

    def seconds(self, machine: str = "spot-0") -> dict[str, float]:
        self.meter.advance(self.run.now)
        self.meter.flush()
        wasted = self.ledger.wasted_ns().get(machine, {})
        return {str(kind): round(ns / 1e9, 6) for kind, ns in sorted(wasted.items())}


@pytest.fixture
def metered(tmp_path: Path, new_run: Any) -> Iterator[Callable[..., Metered]]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield lambda **config: Metered(new_run(**config), ledger)
    ledger.close()


def one_machine_works(made: Metered) -> None:
    """spot-0 is launched at 1, dials in at 2, serves from 4 on, and gets a response at 6."""
    run = made.run
    made.at(1)
    made.buy("spot-0")
    made.at(2)
    run.publish(0)
    run.join("spot-0/0", machine="spot-0")
    made.at(4)
    run.ready("spot-0/0")
    made.at(6)
    run.step(0, 0)


def test_a_machine_boots_until_it_serves_and_idles_without_work(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    one_machine_works(made)
    assert made.seconds() == {"boot": 3.0, "idle": 2.0}
    made.meter.advance(made.run.now)  # looks again: it works from here on
    made.at(9)
    assert made.seconds() == {"boot": 3.0, "idle": 2.0}
    made.run.finish(0)
    made.meter.advance(made.run.now)
    made.at(11)
    assert made.seconds() == {"boot": 3.0, "idle": 4.0}


def test_a_killed_instance_lost_what_it_did_since_its_last_tokens(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    one_machine_works(made)
    made.at(10)
    made.tokens("spot-0/0", 0)
    made.run.now = 10.4
    made.run.send(Disconnected(10.4, "spot-0/0", made.run.epoch("spot-0/0")))
    made.at(11)  # given up at 10.9
    assert made.seconds()["lost"] == pytest.approx(0.9, abs=0.11)  # ticks come every half second here


def test_an_instance_that_dies_before_its_first_token_lost_all_since_it_got_the_work(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    made.tokens("spot-0/0")  # of a former step: long ago
    one_machine_works(made)
    made.at(8)
    made.run.send(Disconnected(8.0, "spot-0/0", made.run.epoch("spot-0/0")))
    made.at(9)
    assert made.seconds()["lost"] == pytest.approx(2.5, abs=0.51)


def test_an_idle_instance_that_dies_loses_nothing(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    one_machine_works(made)
    made.at(8)
    made.run.finish(0)
    made.run.send(Disconnected(8.0, "spot-0/0", made.run.epoch("spot-0/0")))
    made.at(10)
    assert "lost" not in made.seconds()


def test_one_of_two_instances_loses_half_a_machine(metered: Any) -> None:
    made = metered(max_spot_instances=2, instances_per_machine=2)
    made.buy("spot-0")
    made.run.publish(0)
    for name in ("spot-0/0", "spot-0/1"):
        made.run.join(name, machine="spot-0")
        made.run.ready(name)
    made.run.step(0, 0, groups=4, size=1)
    made.at(4)
    for name in ("spot-0/0", "spot-0/1"):
        made.tokens(name)
    made.at(6)
    made.run.send(Disconnected(6.0, "spot-0/1", made.run.epoch("spot-0/1")))
    made.at(7)
    assert made.seconds()["lost"] == pytest.approx(1.25, abs=0.26)


def test_a_migrated_response_pays_its_start_once_more(metered: Any) -> None:
    made = metered(max_spot_instances=2)
    run = made.run
    for machine in ("spot-0", "spot-1"):
        made.buy(machine)
    run.publish(0)
    for name in ("spot-0/0", "spot-1/0"):
        run.join(name, machine=name[:-2])
        run.ready(name)
    run.step(0, 0, groups=4, size=1)
    made.at(2)
    for name in ("spot-0/0", "spot-1/0"):
        made.tokens(name, *(r for r, at in run.where().items() if at == name))
        assert "redone" not in made.seconds(name[:-2]), "a first start is no repetition"
    run.release(0)  # handed over
    target = run.where()[0]
    held = run.core.instances[target].num_assigned
    assert held > 1
    made.at(3)
    made.tokens(target, 0)
    made.tokens(target, 0)  # only the first tokens count
    made.at(4)
    assert made.seconds(target[:-2])["redone"] == pytest.approx(1.0 / held)


def test_going_back_to_a_checkpoint_undoes_the_work_since(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    run = made.run
    one_machine_works(made)  # step 0 under version 0 from 6 on
    made.meter.advance(run.now)
    made.at(8)
    run.finish(0)
    run.send(StepTrained(run.now, 0, 0.0, 1.0))
    run.publish(1)
    run.ready("spot-0/0", 1)
    run.step(1, 1)
    made.meter.advance(run.now)
    made.at(11)
    assert "redone" not in made.seconds()
    run.publish(2)
    run.ready("spot-0/0", 2)
    run.step(1, 2)  # step 1 anew under another version: its 3 seconds are undone, those of step 0 are not
    assert made.seconds()["redone"] == 3.0
    run.ready("spot-0/0", 2)
    run.step(1, 2)  # the same again opens nothing
    assert made.seconds()["redone"] == 3.0


def test_the_reserved_machine_boots_until_the_first_step_and_idles_while_its_trainer_waits(
    metered: Any,
) -> None:
    made = metered(reserved_instances=1)
    run = made.run
    made.buy(RESERVED_MACHINE, "reserved")
    made.meter.advance(0.0)
    run.join("reserved-0/0", Pool.RESERVED, machine=RESERVED_MACHINE)
    run.slept("reserved-0/0")
    made.at(5)
    run.publish(0)
    run.step(0, 0)
    run.ready("reserved-0/0", 0)
    assert made.seconds(RESERVED_MACHINE) == {"boot": 5.0}
    made.at(8)
    run.finish(0)
    run.slept("reserved-0/0")
    made.at(12)
    run.send(StepTrained(run.now, 0, 1.25, 2.0))
    made.at(13)
    assert made.seconds(RESERVED_MACHINE)["idle"] == pytest.approx(1.25, abs=1.0)
    assert made.seconds(RESERVED_MACHINE)["boot"] == 5.0


def test_the_reserved_machine_of_a_resumed_run_boots_until_its_next_step(metered: Any) -> None:
    made = metered(reserved_instances=0)
    made.buy(RESERVED_MACHINE, "reserved")
    made.run.publish(0)
    made.run.step(0, 0)
    made.at(2)
    made.run.send(StepTrained(2.0, 0, 0.0, 0.0))
    made.ledger.record_step(0, started_at=T0, ended_at=T0 + 2, tokens=9, reward_mean=0.5, metrics={})
    made.ledger.ended(RESERVED_MACHINE, T0 + 2)
    made.at(3)
    before = made.seconds(RESERVED_MACHINE)
    made.ledger.launched(RESERVED_MACHINE, T0 + 3)  # rlboost launch --resume
    made.meter = made.new_meter()
    made.at(10)
    made.run.step(1, 1)
    made.at(12)
    after = made.seconds(RESERVED_MACHINE)
    assert after["boot"] - before.get("boot", 0.0) == pytest.approx(7.0, abs=1.0)
    made.run.send(StepTrained(12.0, 1, 0.0, 0.0))
    made.ledger.record_step(1, started_at=T0 + 10, ended_at=T0 + 12, tokens=9, reward_mean=0.5, metrics={})
    made.meter = made.new_meter()  # the coordinator was started again
    made.at(14)
    assert made.seconds(RESERVED_MACHINE)["boot"] == after["boot"]


def test_claims_beyond_the_time_worked_are_not_paid(metered: Any) -> None:
    made = metered(reserved_instances=0)
    made.buy(RESERVED_MACHINE, "reserved")
    made.run.publish(0)
    made.run.step(0, 0)
    made.meter.advance(0.0)
    made.at(2)
    made.run.send(StepTrained(2.0, 0, 1000.0, 0.0))
    made.at(4)
    assert sum(made.seconds(RESERVED_MACHINE).values()) <= 4.0


def test_a_new_meter_goes_on_where_the_books_are(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    one_machine_works(made)
    made.at(8)
    before = made.seconds()
    made.meter = made.new_meter()  # the coordinator was started again
    made.at(10)
    made.run.send(Disconnected(10.0, "spot-0/0", made.run.epoch("spot-0/0")))
    made.at(11)
    after = made.seconds()
    assert after["boot"] == before["boot"], "it had served before"
    assert 0 < after["lost"] <= 3.0


def test_an_ended_machine_is_charged_no_longer(metered: Any) -> None:
    made = metered(max_spot_instances=1)
    one_machine_works(made)
    made.at(8)
    made.ledger.ended("spot-0", T0 + 8)
    made.run.send(MachineGone(8.0, "spot-0"))
    total = sum(made.seconds().values())
    made.at(20)
    assert sum(made.seconds().values()) == total
    assert made.run.core.counters.losses[LossCause.MACHINE_GONE] == 1
