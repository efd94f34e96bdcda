"""What may go wrong before a machine works, one fault at a time, over the clouds' own APIs: it is replaced or
left alone, each second of it is in the books, and nothing is bought that nobody knows of.

Storms of such faults are in test_cloud_faults.py and, over the real SkyPilot, in tests/cloud.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.gcp.machines import GcpPool
from rlboost_providers.gcp.provider import GcpProvider
from rlboost_runtime.billing.accounts import MachineBill
from rlboost_runtime.coordinator.fleet import controller as fleet_module
from rlboost_runtime.coordinator.fleet import offer_choice
from rlboost_runtime.core.base.messages import (
    CoreConfig,
    InstanceJoined,
    InstanceReady,
    LaunchFailed,
    Pool,
    VersionPublished,
)
from rlboost_runtime.core.state import machines as core_machines
from tests.fakes.ec2 import IMAGE, REGION, FakeEc2, Refusal, fake_ec2
from tests.fakes.gce import FakeGce, HttpRefusal, fake_gce
from tests.integration.storm_books import check_books
from tests.unit.coordinator import test_fleet
from tests.unit.coordinator.test_fleet import Made, fleet_on

pytestmark = pytest.mark.integration

OWNER = "0123456789ab"
KIND = "g5.xlarge"
BOOT_S = 1.5
NO_BUDGET = 10**9
EPOCHS = itertools.count(1)


@dataclass
class Ec2:
    fake: FakeEc2
    zones = (f"{REGION}a", f"{REGION}b")
    stock_out = "InsufficientInstanceCapacity"
    no_quota = "MaxSpotInstanceCountExceeded"

    def provider(self) -> AwsProvider:
        pool = AwsPool(REGION, "A10G:1", (KIND,), IMAGE, 900_000, 1_006_000)
        return AwsProvider([pool], OWNER, client=self.fake.client, watch_every_s=0.05)

    def living(self) -> list[Any]:
        return self.fake.instances()

    def reclaim(self) -> None:
        self.fake.reclaim(self.living()[0])

    def bought(self) -> list[str]:
        marks = [{t["key"]: t["value"] for t in i.get_tags()} for i in self.fake.instances(alive=False)]
        return [mark["rlboost-machine"] for mark in marks]

    def refuse_machines(self, code: str) -> None:
        self.fake.fleet_errors = dict.fromkeys(self.zones, code)

    def refuse(self, what: str) -> None:
        code, status = {
            "credentials": ("ExpiredToken", 401),
            "throttling": ("RequestLimitExceeded", 503),
            "away": ("InternalError", 503),
        }[what]
        self.fake.refusals.append(Refusal("", code, status, times=10**6))

    def num_asked(self) -> int:
        return self.fake.calls.count("CreateFleet")


@dataclass
class Gce:
    fake: FakeGce
    zones = ("us-central1-a", "us-central1-b", "us-central1-c", "us-central1-f")
    stock_out = "ZONE_RESOURCE_POOL_EXHAUSTED"
    no_quota = "QUOTA_EXCEEDED"

    def provider(self) -> GcpProvider:
        pool = GcpPool("us-central1", "L4:1", "g2-standard-4", 600_000, "test")
        clients = self.fake.clients
        return GcpProvider([pool], OWNER, clients=lambda: clients, watch_every_s=0.05, operation_s=2.0)

    def living(self) -> list[Any]:
        return self.fake.living()

    def reclaim(self) -> None:
        self.fake.reclaim(self.living()[0]["labels"]["rlboost-machine"])

    def bought(self) -> list[str]:
        failed = {o["targetLink"].rpartition("/")[2] for o in self.fake.operations.values() if o.get("error")}
        return [body["name"] for body in self.fake.bodies if body["name"] not in failed]

    def refuse_machines(self, code: str) -> None:
        self.fake.errors = dict.fromkeys(self.zones, code)

    def refuse(self, what: str) -> None:
        status, reason = {
            "credentials": (401, "authError"),
            "throttling": (429, "rateLimitExceeded"),
            "away": (503, "backendError"),
        }[what]
        self.fake.refusals.append(HttpRefusal("", status, reason, times=10**6))

    def num_asked(self) -> int:
        return len(self.fake.bodies)


@pytest.fixture(params=["aws", "gcp"])
def cloud(request: pytest.FixtureRequest) -> Any:
    if request.param == "gcp":
        with fake_gce() as fake:
            yield Gce(fake)
        return
    with fake_ec2() as fake:
        fake.prices = {(KIND, zone): 0.3 for zone in Ec2.zones}
        yield Ec2(fake)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setattr("rlboost_providers.gcp.provider.CALL_S", 2.0)
    monkeypatch.setattr("rlboost_providers.aws.prices.KEEP_S", 0.05)
    monkeypatch.setattr(fleet_module, "DESCRIBE_EVERY_S", 0.05)
    monkeypatch.setattr(fleet_module, "RETRY_ERROR_S", 0.1)
    monkeypatch.setattr(core_machines, "TERMINATE_AGAIN_S", 0.2)
    monkeypatch.setattr(core_machines, "RELAUNCH_PAUSE_S", 0.05)
    for name in ("FIRST_PAUSE_S", "ERROR_PAUSE_S", "NOTHING_PAUSE_S"):
        monkeypatch.setattr(offer_choice, name, 0.3)


@asynccontextmanager
async def fleet(folder: Path, cloud: Any) -> AsyncIterator[Made]:
    async with fleet_on(folder, cloud.provider(), num_machines=1) as made:
        made.driver.apply(VersionPublished(made.driver.now(), 0))
        yield made
        cloud.fake.refusals.clear()
        assert await made.fleet.end_all(60) == []
        deadline = time.monotonic() + 20
        while cloud.living():
            assert time.monotonic() < deadline, "machines are left"
            await asyncio.sleep(0.05)
        check_books(made, NO_BUDGET, cloud.bought())


async def until(made: Made, condition: Callable[[], object], timeout_s: float = 60.0) -> Any:
    """Wait while the core's timers run, as they do in the coordinator."""
    deadline = time.monotonic() + timeout_s
    while True:
        made.driver.tick()
        made.driver.core.check()
        if found := condition():
            return found
        assert time.monotonic() < deadline, [
            (m.machine, m.lifecycle) for m in made.driver.core.machines.values()
        ]
        await asyncio.sleep(0.01)


async def go_on(made: Made, seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    await until(made, lambda: time.monotonic() >= ends_at)


def join(made: Made, machine: str) -> None:
    """The agent of a machine dials in; it is told at once which version to load."""
    epoch = next(EPOCHS)
    made.driver.apply(InstanceJoined(made.driver.now(), f"{machine}/0", machine, Pool.SPOT, epoch, 4, 10_000))


def serve(made: Made, machine: str) -> None:
    join(made, machine)
    epoch = made.driver.core.instances[f"{machine}/0"].epoch
    made.driver.apply(InstanceReady(made.driver.now(), f"{machine}/0", epoch, 0))


def final_bill(made: Made, machine: str) -> MachineBill:
    """Return a machine's bill as it is when the shortest time that a cloud bills is over."""
    (bill,) = [each for each in made.ledger.machines(time.time() + 100) if each.machine == machine]
    return bill


def problems(made: Made) -> list[str]:
    return [event.problem for event in made.events if isinstance(event, LaunchFailed)]


@pytest.mark.parametrize("phase", ["asked for", "given", "listed", "dialled in", "serving"])
async def test_a_machine_taken_in_any_phase_of_its_boot_is_billed_and_replaced(
    tmp_path: Path, cloud: Any, phase: str
) -> None:
    if phase == "asked for":
        taking = threading.Thread(target=take_the_first, args=(cloud,))
        taking.start()
    async with fleet(tmp_path, cloud) as made:
        if phase == "asked for":
            await until(made, lambda: not taking.is_alive())
            taking.join()
        else:
            await until(made, lambda: made.book_state("spot-0") == "running")
            if phase == "listed":
                await go_on(made, 0.3)
            elif phase == "dialled in":
                join(made, "spot-0")
            elif phase == "serving":
                serve(made, "spot-0")
            await asyncio.to_thread(cloud.reclaim)
        second = await until(made, lambda: made.ledger.running_machines() - {"spot-0"})
        await until(made, lambda: made.core_state("spot-0") == "gone")
        bill = final_bill(made, "spot-0")
        assert bill.ended_at is not None, "its bill does not run on"
        assert bill.billed_ns >= 60e9, "its cloud gave it, and bills a minute at least"
        assert bill.billed_ns < 70e9
        assert not made.driver.core.instances, "nobody is waited for on a machine that is gone"
        (name,) = second
        serve(made, name)
        assert str(made.driver.core.instances[f"{name}/0"].state) == "ready"


def take_the_first(cloud: Any) -> None:
    """Take the first machine in the moment in which its cloud has it, before anybody was told."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if cloud.living():
            cloud.reclaim()
            return
        time.sleep(0.001)


async def test_a_machine_that_never_dials_in_is_ended_in_bounded_time_and_replaced(
    tmp_path: Path, cloud: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_fleet, "CoreConfig", functools.partial(CoreConfig, boot_deadline_s=BOOT_S))
    async with fleet(tmp_path, cloud) as made:
        await until(made, lambda: made.book_state("spot-0") == "running")
        began = time.monotonic()
        (name, *_) = await until(made, lambda: made.ledger.running_machines() - {"spot-0"})
        serve(made, name)
        assert time.monotonic() - began < BOOT_S + 30
        await until(made, lambda: made.bill("spot-0").ended_at is not None)
        await go_on(made, BOOT_S + 0.5)
        assert made.book_state(name) == "running", "one that dialled in stays"


async def test_an_api_that_is_away_costs_no_machine_and_hides_none(tmp_path: Path, cloud: Any) -> None:
    async with fleet(tmp_path, cloud) as made:
        await until(made, lambda: made.book_state("spot-0") == "running")
        serve(made, "spot-0")
        cloud.refuse("away")
        await go_on(made, 3.0)
        assert made.book_state("spot-0") == "running", "nothing is known, so nothing is over"
        assert "spot-0/0" in made.driver.core.instances
        cloud.reclaim()
        await go_on(made, 0.5)
        cloud.fake.refusals.clear()
        await until(made, lambda: made.core_state("spot-0") == "gone")
        assert final_bill(made, "spot-0").billed_ns < 75e9
        name = (await until(made, lambda: made.ledger.running_machines() - {"spot-0"})).pop()
        serve(made, name)
        assert len(cloud.bought()) == 2


@pytest.mark.parametrize("what", ["no quota", "stock-out", "credentials", "throttling", "away"])
async def test_where_nothing_is_given_nothing_is_billed_and_nobody_is_pestered(
    tmp_path: Path, cloud: Any, what: str
) -> None:
    if what in ("no quota", "stock-out"):
        cloud.refuse_machines(cloud.no_quota if what == "no quota" else cloud.stock_out)
    else:
        cloud.refuse(what)
    async with fleet(tmp_path, cloud) as made:
        await until(made, lambda: problems(made))
        assert all(problems(made)), "each failure has its words"
        assert cloud.living() == []
        asked = cloud.num_asked()
        await go_on(made, 1.0)
        assert cloud.num_asked() - asked <= 2 * len(cloud.zones)
        assert made.ledger.total_micro_usd(time.time() + 100) == 0
        assert made.ledger.running_machines() == set()


async def test_a_price_above_the_cap_buys_nothing_until_it_falls(tmp_path: Path) -> None:
    with fake_ec2() as fake:
        cloud = Ec2(fake)
        fake.prices = {(KIND, zone): 0.95 for zone in cloud.zones}  # the bid is 0.90
        async with fleet(tmp_path, cloud) as made:
            await until(made, lambda: len(problems(made)) >= 2)
            assert fake.instances() == []
            assert fake.calls.count("CreateFleet") == 0
            fake.set_price(KIND, cloud.zones[1], 0.5)
            (name,) = await until(made, lambda: made.ledger.running_machines())
            serve(made, name)
            assert made.bill(name).price_micro_usd_per_hour == 500_000
