"""Seeded storms over the clouds' APIs: whatever fails, nothing is left or bought twice, and the bill fits.

A real fleet controller with its core and ledger buys from Compute Engine or EC2 on loopback, while a seed
decides what fails: refusals of every kind, lost answers, stock-outs, prices that rise, reclaims, a second
launcher of the same machine, an end in the middle of a launch. RLBOOST_FAULT_SEEDS sets how many seeds are
tried (`make soak`).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass, replace

import pytest

from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base.provider import LaunchRequest, Offer
from rlboost_providers.base.traits import provider_traits
from rlboost_providers.gcp.machines import GcpPool
from rlboost_providers.gcp.provider import GcpProvider
from rlboost_runtime.coordinator.fleet import controller as fleet_module
from rlboost_runtime.coordinator.fleet import offer_choice
from rlboost_runtime.core.state import machines as core_machines
from rlboost_runtime.errors import RLBoostError
from tests.fakes.ec2 import IMAGE, REGION, Refusal, fake_ec2
from tests.fakes.gce import HttpRefusal, fake_gce
from tests.integration.storm_books import check_books, hold_to_budget
from tests.unit.coordinator.test_fleet import Made, fleet_on

pytestmark = pytest.mark.integration

SEEDS = int(os.environ.get("RLBOOST_FAULT_SEEDS", "4"))
OWNER = "0123456789ab"
KIND = "g5.xlarge"
STORM_S = 2.0


@dataclass
class Gce:
    """Compute Engine as the storm sees it."""

    fake: object
    dice: random.Random

    def provider(self):
        pool = GcpPool("us-central1", "L4:1", "g2-standard-4", 600_000, "test")
        clients = self.fake.clients
        return GcpProvider([pool], OWNER, clients=lambda: clients, watch_every_s=0.05, operation_s=2.0)

    def trouble(self) -> None:
        fake, dice = self.fake, self.dice
        match dice.randrange(7):
            case 0:
                status, reason = dice.choice(
                    [(503, "backendError"), (429, "rateLimitExceeded"), (401, "authError")]
                )
                path = dice.choice(["^POST .*/instances$", "/operations/operation-", "^GET", "^DELETE", ""])
                fake.refusals.append(HttpRefusal(path, status, reason, times=dice.randint(1, 3)))
            case 1:
                zone = dice.choice(["us-central1-a", "us-central1-b", "us-central1-f"])
                fake.errors[zone] = dice.choice(["ZONE_RESOURCE_POOL_EXHAUSTED", "QUOTA_EXCEEDED"])
            case 2:
                fake.errors.clear()
            case 3:
                fake.never_done = not fake.never_done
            case 4 | 5 if fake.living():
                fake.reclaim(dice.choice(fake.living())["labels"]["rlboost-machine"])
            case _ if fake.living():
                fake.powered_off(dice.choice(fake.living())["labels"]["rlboost-machine"])

    def calm(self) -> None:
        self.fake.refusals.clear()
        self.fake.errors.clear()
        self.fake.never_done = False

    def num_living(self) -> int:
        return len(self.fake.instances)

    def bought(self) -> list[str]:
        names = [body["name"] for body in self.fake.bodies]
        failed = {o["targetLink"].rpartition("/")[2] for o in self.fake.operations.values() if o.get("error")}
        return [name for name in names if name not in failed]


@dataclass
class Ec2:
    """EC2 as the storm sees it."""

    fake: object
    dice: random.Random

    def provider(self):
        pool = AwsPool(REGION, "A10G:1", (KIND,), IMAGE, 900_000, 1_006_000)
        return AwsProvider([pool], OWNER, client=self.fake.client, watch_every_s=0.05)

    def trouble(self) -> None:
        fake, dice = self.fake, self.dice
        zone = dice.choice([f"{REGION}a", f"{REGION}b"])
        match dice.randrange(7):
            case 0:
                code, status = dice.choice(
                    [("RequestLimitExceeded", 503), ("InternalError", 500), ("RequestExpired", 401)]
                )
                action = dice.choice(["CreateFleet", "DescribeInstances", "TerminateInstances", ""])
                fake.refusals.append(Refusal(action, code, status, times=dice.randint(1, 5)))
            case 1:
                fake.capacity[zone] = dice.randint(0, 1)
            case 2:
                fake.capacity.clear()
            case 3:
                fake.set_price(KIND, zone, dice.choice([0.3, 0.6, 0.95]))
            case 4:
                fake.lose_answers = dice.randint(1, 6)
            case 5:
                fake.lists_lag = not fake.lists_lag
            case _ if fake.instances():
                fake.reclaim(dice.choice(fake.instances()))

    def calm(self) -> None:
        self.fake.refusals.clear()
        self.fake.capacity.clear()
        self.fake.lose_answers = 0
        self.fake.lists_lag = False

    def num_living(self) -> int:
        return len(self.fake.instances())

    def bought(self) -> list[str]:
        marks = [{t["key"]: t["value"] for t in i.get_tags()} for i in self.fake.instances(alive=False)]
        return [mark["rlboost-machine"] for mark in marks]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setattr("rlboost_providers.gcp.provider.CALL_S", 2.0)
    monkeypatch.setattr("rlboost_providers.aws.prices.KEEP_S", 0.05)
    monkeypatch.setattr(fleet_module, "DESCRIBE_EVERY_S", 0.05)
    monkeypatch.setattr(fleet_module, "RETRY_ERROR_S", 0.1)
    lag_s = STORM_S + 0.5  # lists may lag all through it
    monkeypatch.setattr(
        fleet_module, "provider_traits", lambda name: replace(provider_traits(name), launch_lag_s=lag_s)
    )
    monkeypatch.setattr(core_machines, "TERMINATE_AGAIN_S", 0.2)
    monkeypatch.setattr(core_machines, "RELAUNCH_PAUSE_S", 0.05)
    for name in ("FIRST_PAUSE_S", "ERROR_PAUSE_S", "QUOTA_PAUSE_S", "CREDENTIALS_PAUSE_S", "NOTHING_PAUSE_S"):
        monkeypatch.setattr(offer_choice, name, 0.2)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_fails_nothing_is_left_or_bought_twice_and_the_bill_fits(tmp_path, seed):
    dice = random.Random(seed)
    with fake_gce() if seed % 2 == 0 else fake_ec2() as fake:
        cloud = (Gce if seed % 2 == 0 else Ec2)(fake, dice)
        if seed % 2:
            fake.prices = {(KIND, f"{REGION}a"): 0.3, (KIND, f"{REGION}b"): 0.6}
        await storm(tmp_path, cloud, dice)


async def storm(folder, cloud, dice: random.Random) -> None:
    provider = cloud.provider()
    budget = dice.choice([15_000, 40_000, 100_000])  # micro-dollars; a minute is billed 5,000 to 15,000
    async with fleet_on(folder, provider, num_machines=dice.randint(1, 3)) as made:
        hold_to_budget(made, budget)
        ends_at = time.monotonic() + STORM_S * dice.uniform(0.3, 1.0)
        while time.monotonic() < ends_at:
            made.driver.tick()
            made.driver.core.check()
            await asyncio.sleep(dice.uniform(0.02, 0.1))
            if dice.random() < 0.6:
                await asyncio.to_thread(cloud.trouble)
            if dice.random() < 0.1:
                await launch_again(cloud, made)
        if dice.random() < 0.7:
            cloud.calm()
            left = await made.fleet.end_all(60)
            assert left == []
        else:
            await made.fleet.end_all(0.5)  # the cloud does not listen: `gc` has to find what is left
            cloud.calm()
            await wait_for_launches(made)
            for owned in await asyncio.to_thread(provider.sweep):
                await asyncio.to_thread(provider.end, owned)
            assert await made.fleet.end_all(60) == []
        deadline = time.monotonic() + 30
        while cloud.num_living():
            await asyncio.to_thread(provider.describe, "run")  # deletes what shut itself down
            assert time.monotonic() < deadline, "machines are left"
            await asyncio.sleep(0.05)
        check_books(made, budget, cloud.bought())


async def launch_again(cloud, made: Made) -> None:
    """A second launcher asks for a machine that the first one has asked for."""
    running = sorted(made.ledger.running_machines())
    if not running:
        return
    bill = made.bill(running[-1])
    provider = cloud.provider()
    try:
        offers: list[Offer] = await asyncio.to_thread(provider.offers)
        bootstrap = {"machine": bill.machine, "instances": [f"{bill.machine}/0"]}
        if offers:
            await asyncio.to_thread(provider.launch, LaunchRequest("run", bill.machine, offers[0], bootstrap))
    except RLBoostError:
        return


async def wait_for_launches(made: Made) -> None:
    async with asyncio.timeout(60):
        while made.fleet._launching or made.fleet._busy:  # noqa: ASYNC110 threads end it
            await asyncio.sleep(0.02)
