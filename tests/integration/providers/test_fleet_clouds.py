"""The fleet controller over real providers: bids and the ledger, stock-outs that fail over."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rlboost_providers.aws.machines import AwsPool
from rlboost_providers.aws.provider import AwsProvider
from rlboost_providers.base.multi import MultiProvider
from rlboost_providers.gcp.machines import GcpPool
from rlboost_providers.gcp.provider import GcpProvider
from rlboost_runtime.billing.accounts import to_ns, to_seconds
from rlboost_runtime.coordinator.fleet import controller as fleet_module
from rlboost_runtime.coordinator.fleet import offer_choice
from rlboost_runtime.core.base.messages import LaunchFailed
from rlboost_runtime.core.state import machines as core_machines
from tests.fakes.ec2 import IMAGE, REGION, fake_ec2
from tests.fakes.gce import fake_gce
from tests.unit.coordinator.test_fleet import Made, fleet_on
from tests.unit.coordinator.test_fleet import until as until_true

pytestmark = pytest.mark.integration

KIND, A, OWNER = "g5.xlarge", f"{REGION}a", "0123456789ab"
POOL = AwsPool(REGION, "A10G:1", (KIND,), IMAGE, 500_000, 1_006_000)
L4 = GcpPool("us-central1", "L4:1", "g2-standard-4", 600_000, "test")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fleet_module, "DESCRIBE_EVERY_S", 0.05)
    monkeypatch.setattr(core_machines, "TERMINATE_AGAIN_S", 0.2)
    monkeypatch.setattr(offer_choice, "NOTHING_PAUSE_S", 0.2)


async def until(made: Made, condition: Callable[[], object]) -> None:
    """Wait while the core's timers run, as they do in the coordinator."""

    def ticked() -> object:
        made.state.tick()
        return condition()

    await until_true(ticked, 100)


async def test_a_bid_that_is_passed_ends_the_machine_and_its_bill_and_buys_no_other(tmp_path):
    with fake_ec2() as ec2:
        ec2.prices = {(KIND, A): 0.36}
        provider = AwsProvider([POOL], OWNER, client=ec2.client, watch_every_s=0.05)
        async with fleet_on(tmp_path, provider, num_machines=1) as made:
            await until(made, lambda: made.book_state("spot-0") == "running")
            assert made.bill("spot-0").zone == A
            ec2.set_price(KIND, A, 0.51)
            await until(made, lambda: made.book_state("spot-0") == "gone")
            await until(made, lambda: any(isinstance(event, LaunchFailed) for event in made.events))
            [view] = provider.describe("run")
            bill = made.bill("spot-0")
            assert (bill.launched_at, bill.ended_at) == (
                view.started_at,
                to_seconds(to_ns(view.ended_at)),
            )
            seconds = max(60.0, view.ended_at - view.started_at)  # EC2 bills a minute at least
            total = made.ledger.total_micro_usd(time.time() + 100)
            assert total == pytest.approx(360_000 * seconds / 3600, abs=1)
            assert ec2.instances() == []
            assert ec2.calls.count("CreateFleet") == 1, "nothing was asked for above the bid"


@pytest.mark.parametrize("is_answer_lost", [False, True])
async def test_a_machine_is_in_the_books_with_its_zone_and_price_though_its_launch_was_not_seen_whole(
    tmp_path, is_answer_lost
):
    with fake_ec2() as ec2:
        ec2.prices = {(KIND, A): 0.36}
        ec2.lists_lag = not is_answer_lost
        ec2.lose_answers = 99 if is_answer_lost else 0
        provider = AwsProvider([POOL], OWNER, client=ec2.client, watch_every_s=0.05)
        async with fleet_on(tmp_path, provider, num_machines=1) as made:
            await until(made, lambda: made.book_state("spot-0") in ("running", "gone"))
            bill = made.bill("spot-0")
            assert (bill.zone, bill.price_micro_usd_per_hour) == (A, 360_000)
            ec2.lists_lag, ec2.lose_answers = False, 0
            assert await made.fleet.end_all(30) == []


class Resting:
    """A provider whose list is never due."""

    asked = 0

    def watch(self, run):
        self.asked += 1


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_machine_that_one_list_lacks_is_there_and_is_neither_replaced_nor_forgotten(
    tmp_path, is_restarted
):
    with fake_ec2() as ec2:
        ec2.prices = {(KIND, A): 0.36}
        ec2.lists_lag = is_restarted
        provider = AwsProvider([POOL], OWNER, client=ec2.client, watch_every_s=0.05)
        async with fleet_on(tmp_path, provider, num_machines=1) as made:
            await until(made, lambda: made.book_state("spot-0") == "running")
            looks = ec2.calls.count("DescribeInstances")
            await until(made, lambda: ec2.calls.count("DescribeInstances") > looks + 3)
            if is_restarted:  # another process knows what is in the books and the cloud, and no more
                made.fleet._provider = resting = Resting()
                await until(made, lambda: resting.asked)  # what was asked before has been heard
                made.fleet._provider = AwsProvider([POOL], OWNER, client=ec2.client, watch_every_s=0.05)
                made.fleet._seen = set()
            ec2.lists_lag = True
            looks = ec2.calls.count("DescribeInstances")
            await until(made, lambda: ec2.calls.count("DescribeInstances") > looks + 5)
            assert made.book_state("spot-0") == "running"
            assert ec2.calls.count("CreateFleet") == 1
            if is_restarted:
                assert await made.fleet.end_all(0.5) == ["spot-0"], "nobody knows that it is gone"
                ec2.lists_lag = False
            assert await made.fleet.end_all(30) == []
            assert ec2.instances() == []
            assert made.ledger.open_machines() == []


async def test_a_stock_out_fails_over_to_the_next_zone_and_then_to_the_next_cloud(tmp_path):
    with fake_ec2() as ec2, fake_gce() as gce:
        ec2.prices = {(KIND, A): 0.36}
        ec2.capacity = {A: 0}
        gce.errors = {"us-central1-a": "ZONE_RESOURCE_POOL_EXHAUSTED"}
        provider = MultiProvider(
            {
                "aws": AwsProvider([POOL], OWNER, client=ec2.client, watch_every_s=0.05),
                "gcp": GcpProvider([L4], OWNER, clients=lambda: gce.clients, watch_every_s=0.05),
            }
        )
        async with fleet_on(tmp_path, provider, num_machines=1) as made:
            await until(made, lambda: made.ledger.running_machines())
            [machine] = made.ledger.running_machines()
            bill = made.bill(machine)
            assert (bill.provider, bill.zone) == ("gcp", "us-central1-b")
            problems = [event.problem for event in made.events if isinstance(event, LaunchFailed)]
            assert "InsufficientInstanceCapacity" in problems[0]
            assert "ZONE_RESOURCE_POOL_EXHAUSTED" in problems[1]
            failed = [b for b in made.ledger.machines(time.time()) if b.state == "failed"]
            assert [b.cost_micro_usd for b in failed] == [0, 0]
            assert await made.fleet.end_all(30) == []
            assert gce.living() == []
