"""The fleet controller over a cloud in memory that answers late, fails, and forgets to answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlboost_providers.base.multi import MultiProvider
from rlboost_providers.base.provider import LaunchRequest, MachineStatus, MachineView, Offer, Provider
from rlboost_providers.base.traits import ProviderTraits
from rlboost_runtime.billing.accounts import BilledState
from rlboost_runtime.billing.launch_records import LaunchRecords, MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.driver.totals import recover
from rlboost_runtime.coordinator.fleet import controller as fleet_module
from rlboost_runtime.coordinator.fleet import offer_choice
from rlboost_runtime.coordinator.fleet.controller import FleetController, MachineMaker
from rlboost_runtime.coordinator.fleet.offer_rank import OfferRank
from rlboost_runtime.coordinator.fleet.reserved_nodes import ReservedNodes
from rlboost_runtime.coordinator.observers.waste import WasteMeter
from rlboost_runtime.core.base.messages import (
    Command,
    CoreConfig,
    Event,
    LaunchFailed,
    LaunchMachine,
    RunEnding,
    TerminateMachine,
)
from rlboost_runtime.core.base.timers import Timer
from rlboost_runtime.core.base.token_cost import MachineKind
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.state import machines as core_machines
from rlboost_runtime.errors import CredentialsRejected, NoCapacity, ProviderError
from rlboost_runtime.job import Job, ReasoningGym, TinyModel
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.seams import SystemClock, SystemDisk

PRICE = 3_600_000_000  # micro-dollars per hour: $1 a second


class Cloud:
    """Machines in a dictionary; `after_list` and `launching` let a test act in the middle of a call."""

    def __init__(self) -> None:
        self.views: dict[str, MachineView] = {}
        self.num_launched = 0
        self.after_list: Callable[[], None] = lambda: None
        self.launching: Callable[[str], None] = self.start

    def start(self, machine: str) -> None:
        self.num_launched += 1
        self.views[machine] = MachineView(machine, MachineStatus.RUNNING, time.time(), None)

    def end(self, machine: str, *, started_at: float | None, ended_at: float) -> None:
        self.views[machine] = MachineView(machine, MachineStatus.GONE, started_at, ended_at)

    def offers(self) -> list[Offer]:
        return [Offer("local", "zone", "cpu", PRICE, True, "test")]

    def launch(self, request: LaunchRequest) -> MachineView:
        self.launching(request.machine)
        return self.views[request.machine]

    def describe(self, run: str) -> list[MachineView]:
        views = list(self.views.values())
        self.after_list()
        return views

    def watch(self, run: str) -> list[MachineView]:
        return self.describe(run)

    def terminate(self, run: str, machine: str) -> None:
        view = self.views.get(machine)
        if view is not None and view.state is not MachineStatus.GONE:
            self.end(machine, started_at=view.started_at, ended_at=time.time())


class Made:
    """A fleet with a real core and ledger."""

    def __init__(
        self,
        folder: Path,
        cloud: Provider,
        cap: int | None,
        num_machines: int,
        floor: int = 0,
        job: Job | None = None,
        num_nodes: int = 0,
    ) -> None:
        self.run = RunFolder(folder)
        self.run.journal.mkdir()
        self.cloud, self.ledger, clock = cloud, Ledger(self.run.ledger), SystemClock()
        self.config = CoreConfig(max_spot_instances=num_machines, reserved_instances=0, seeding_initial_s=1.0)
        self.events: list[Any] = []
        self.driver = CoreDriver(
            self.run, recover(self.run.events), clock, SystemDisk(), Outlet(self), (self,), keep_journal=False
        )
        logs = folder / "logs"
        maker = MachineMaker("run", lambda name: {"machine": name, "instances": [f"{name}/0"]}, logs)
        self.fleet = FleetController(
            self.driver, self.ledger, cloud, maker, clock, cap, on_demand_floor=floor,
            rank=None if job is None else OfferRank(job, lambda: self.driver.core, self.ledger.zone_of),
            nodes=ReservedNodes(num_nodes),
        )  # fmt: skip

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        self.events.append(event)

    def core_state(self, machine: str) -> str:
        known = self.driver.core.machines.get(machine)
        return "gone" if known is None else str(known.state)

    def book_state(self, machine: str) -> str:
        bills = self.ledger.machines(time.time())
        return next((str(bill.state) for bill in bills if bill.machine == machine), "")

    def bill(self, machine: str) -> Any:
        return next(b for b in self.ledger.machines(time.time()) if b.machine == machine)


@asynccontextmanager
async def fleet_on(
    folder: Path,
    cloud: Provider,
    cap: int | None = None,
    num_machines: int = 1,
    floor: int = 0,
    job: Job | None = None,
    num_nodes: int = 0,
) -> AsyncIterator[Made]:
    made = Made(folder, cloud, cap, num_machines, floor, job, num_nodes)
    made.driver.journal.start(asyncio.get_running_loop())
    serving = asyncio.create_task(made.fleet.serve())
    try:
        made.driver.begin(made.config)
        yield made
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await made.driver.journal.close()
        made.ledger.close()


class Outlet:
    """Commands to machines reach the fleet; there is nobody else, whatever is sent to them."""

    def __init__(self, made: Made) -> None:
        self._made = made

    def fleet(self, command: LaunchMachine | TerminateMachine) -> None:
        self._made.fleet.carry_out(command)

    def to_agent(self, command: Command) -> None:
        pass

    def lease(self, command: Command) -> None:
        pass

    def work(self, command: Command, item: Any) -> None:
        raise AssertionError("no agent")

    def deliver(self, group: Any) -> None:
        raise AssertionError("no trainer")


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 it depends on the cloud's threads
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "DESCRIBE_EVERY_S", 0.02)
    monkeypatch.setattr(fleet_module, "NODES_EVERY_S", 0.02)
    monkeypatch.setattr(core_machines, "TERMINATE_AGAIN_S", 0.1)


async def test_a_launch_that_ends_while_the_cloud_lists_its_machines_is_not_taken_for_gone(
    tmp_path: Path,
) -> None:
    cloud = Cloud()
    listed, go_on = threading.Event(), threading.Event()

    def hold_an_empty_list() -> None:
        if not cloud.views or listed.is_set():
            listed.set()
            go_on.wait(5)

    cloud.after_list = hold_an_empty_list

    def start_once_listed(machine: str) -> None:
        listed.wait(5)
        cloud.start(machine)

    cloud.launching = start_once_listed
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        await asyncio.sleep(0.05)
        cloud.after_list = lambda: None
        go_on.set()
        await asyncio.sleep(0.2)
        assert made.core_state("spot-0") == "launched"
        assert made.bill("spot-0").state is BilledState.RUNNING


async def test_a_machine_that_vanishes_from_the_list_is_gone_and_is_ended_if_it_comes_back(
    tmp_path: Path,
) -> None:
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        view = cloud.views.pop("spot-0")
        await until(lambda: made.book_state("spot-0") == "gone")
        assert made.core_state("spot-0") == "gone"
        cloud.views["spot-0"] = view
        await until(lambda: cloud.views["spot-0"].state is MachineStatus.GONE)


@pytest.mark.parametrize("error", [OSError("connection reset"), ProviderError("lost", "ask again")])
async def test_a_machine_whose_launch_seemed_to_fail_is_billed_and_ended(
    tmp_path: Path, error: Exception
) -> None:
    cloud = Cloud()

    def start_and_lose_the_answer(machine: str) -> None:
        cloud.start(machine)
        raise error

    cloud.launching = start_and_lose_the_answer
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: any(isinstance(event, LaunchFailed) for event in made.events))
        await until(lambda: cloud.views["spot-0"].state is MachineStatus.GONE)
        await until(lambda: made.book_state("spot-0") == "gone")
        view, bill = cloud.views["spot-0"], made.bill("spot-0")
        assert view.started_at is not None
        assert view.ended_at is not None
        assert bill.billed_ns == pytest.approx((view.ended_at - view.started_at) * 1e9, abs=3e3)
        assert made.core_state("spot-0") == "gone"


@pytest.mark.parametrize("turns_up", [True, False])
async def test_a_launch_of_unknown_outcome_is_committed_until_the_lists_would_have_shown_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns_up: bool
) -> None:
    monkeypatch.setattr(fleet_module, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=0.5))
    cloud = Cloud()

    def lose_the_answer(machine: str) -> None:
        raise ProviderError("lost", "ask again")

    cloud.launching = lose_the_answer
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: any(isinstance(event, LaunchFailed) for event in made.events))
        failed_at = time.monotonic()
        assert made.ledger.rate_micro_usd_per_hour() == PRICE
        await asyncio.sleep(0.2)
        assert made.book_state("spot-0") == "intended"
        assert await made.fleet.end_all(0.1) == ["spot-0"]  # nobody says that it will not come
        if turns_up:
            cloud.start("spot-0")
        assert await made.fleet.end_all(5) == []
        assert made.book_state("spot-0") == ("gone" if turns_up else "failed")
        assert turns_up or time.monotonic() - failed_at >= 0.5
        assert made.ledger.rate_micro_usd_per_hour() == 0


async def test_a_refused_launch_leaves_its_room_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=60.0))
    cloud = Cloud()

    def refuse(machine: str) -> None:
        raise NoCapacity("nothing here", "elsewhere")

    cloud.launching = refuse
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.book_state("spot-0") == "failed")
        assert await made.fleet.end_all(5) == []


async def test_a_launch_in_doubt_is_settled_although_its_end_is_asked_for_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=0.5))
    cloud = Cloud()

    def lose_the_answer(machine: str) -> None:
        raise ProviderError("lost", "ask again")

    def end_slowly(run: str, machine: str) -> None:
        time.sleep(0.15)

    cloud.launching = lose_the_answer
    monkeypatch.setattr(cloud, "terminate", end_slowly)
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: any(isinstance(event, LaunchFailed) for event in made.events))
        ending = asyncio.create_task(made.fleet.end_all(4))
        while not ending.done():
            made.fleet.carry_out(TerminateMachine("spot-0", "the run is ending"))
            await asyncio.sleep(0.2)
        assert await ending == []
        assert made.book_state("spot-0") == "failed"


async def test_a_launch_in_doubt_is_in_doubt_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=0.3))
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud, num_machines=0) as made:
        made.ledger.intend(
            MachineRecord(
                "spot-77",
                pool="spot",
                provider="local",
                zone="zone",
                accelerator="cpu",
                price_micro_usd_per_hour=PRICE,
                price_source="test",
                intended_at=time.time(),
            )
        )
        made.fleet._bought.add("spot-77", cloud.offers()[0])
        await asyncio.sleep(0.1)
        assert made.book_state("spot-77") == "intended"
        await until(lambda: made.book_state("spot-77") == "failed")


@pytest.mark.parametrize("is_unwanted", [False, True])
async def test_at_the_end_a_launch_that_nobody_repeats_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_unwanted: bool
) -> None:
    """The core wants the machine whose launch had no answer, or has it ended; a closed fleet does not ask
    again."""
    monkeypatch.setattr(fleet_module, "provider_traits", lambda name: ProviderTraits(name, launch_lag_s=0.6))
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud, num_machines=0) as made:
        made.ledger.intend(MachineRecord.of("spot-1", cloud.offers()[0], time.time()))
        made.fleet._bought.add("spot-1", cloud.offers()[0])
        table = made.driver.core._fleet
        table._next_number = 2
        state = core_machines.MachineState.REQUESTED
        if is_unwanted:
            state = core_machines.MachineState.TERMINATING
            made.driver.core._context.timers.set(Timer.TERMINATE, "spot-1", made.driver.now() + 60)
        assert table._add(1, state, 0.0).is_alive
        ending = asyncio.create_task(made.fleet.end_all(5))
        await asyncio.sleep(0.2)
        assert not ending.done()
        cloud.start("spot-1")
        assert await ending == []
        assert cloud.views["spot-1"].state is MachineStatus.GONE
        assert made.book_state("spot-1") == "gone"


async def test_what_a_former_coordinator_launched_is_not_gone_because_the_wall_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "provider_traits", lambda name: ProviderTraits(name, list_lag_s=1.0))
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.book_state("spot-0") == "running")
        listed, cloud.views = cloud.views, {}
        monkeypatch.setattr(SystemClock, "wall", lambda self: time.time() + 1000)
        made.fleet._seen.clear()  # as a coordinator that has just begun
        made.fleet._began = SystemClock().now()
        await asyncio.sleep(0.3)
        assert made.book_state("spot-0") == "running", "the lists may lag still"
        cloud.views = listed
        await until(lambda: "spot-0" in made.fleet._seen)
        cloud.views = {}
        await until(lambda: made.book_state("spot-0") == "gone")


class ShowingCloud(Cloud):
    """A cloud that keeps consoles for as long as the machine is there."""

    def console(self, run: str, machine: str) -> str:
        if self.views[machine].state is MachineStatus.GONE:
            raise ProviderError(f"no console of {machine}", "ask sooner")
        return "Linux\r\n\x1b[31mno space left on device\x1b[0m\r\n"


@pytest.mark.parametrize("joins", [False, True])
async def test_what_a_machine_said_that_never_dialled_in_is_kept_before_it_is_ended(
    tmp_path: Path, joins: bool
) -> None:
    cloud = ShowingCloud()
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        made.driver.core.machines["spot-0"].has_joined = joins
        made.fleet.carry_out(TerminateMachine("spot-0", "it did not dial in"))
        await until(lambda: made.book_state("spot-0") == BilledState.GONE)
    log = tmp_path / "logs" / "spot-0" / "console.log"
    assert (log.read_text() if log.exists() else None) == (
        None if joins else "Linux\nno space left on device\n"
    )


@pytest.mark.parametrize("call", ["offers", "launch", "watch", "console", "terminate", "describe"])
async def test_whatever_a_clouds_library_raises_the_fleet_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(fleet_module, "RETRY_ERROR_S", 0.05)
    monkeypatch.setattr(offer_choice, "ERROR_PAUSE_S", 0.05)
    cloud = ShowingCloud()
    works, failures = getattr(cloud, call), [KeyError("token"), AttributeError("no such thing")]

    def break_at_first(*asked: object) -> object:
        if failures:
            raise failures.pop()
        return works(*asked)

    setattr(cloud, call, break_at_first)
    async with fleet_on(tmp_path, cloud) as made:

        def is_up() -> bool:
            made.driver.tick()
            return bool(made.ledger.running_machines())

        await until(is_up)
        (machine,) = made.ledger.running_machines()
        made.fleet.carry_out(TerminateMachine(machine, "it did not dial in"))
        await until(lambda: len(failures) < 2 or call == "describe")
        assert await made.fleet.end_all(5) == []
    broke = [record for record in caplog.records if record.message == "provider.broke"]
    assert broke
    assert broke[0].exc_info


async def test_a_price_that_moves_while_the_machine_stays_is_billed_up_to_the_bid(tmp_path: Path) -> None:
    cloud = Cloud()
    offer = Offer("local", "zone", "cpu", PRICE, True, "test", max_price_micro_usd_per_hour=3 * PRICE)
    cloud.offers = lambda: [offer]  # type: ignore[method-assign]
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        for price, billed in ((2 * PRICE, 2 * PRICE), (4 * PRICE, 3 * PRICE), (None, 3 * PRICE)):
            cloud.views["spot-0"] = replace(cloud.views["spot-0"], price_micro_usd_per_hour=price)
            await until(lambda billed=billed: made.ledger.rate_micro_usd_per_hour() == billed)
            await asyncio.sleep(0.1)
        bill = made.bill("spot-0")
        assert bill.price_micro_usd_per_hour == 3 * PRICE
        seconds = bill.billed_ns / 1e9
        assert seconds * 1e6 < bill.cost_micro_usd < seconds * 3e6
        assert bill.num_lives == 1


async def test_a_machine_that_the_run_does_not_know_is_ended(tmp_path: Path) -> None:
    cloud = Cloud()
    cloud.start("spot-77")
    async with fleet_on(tmp_path, cloud):
        await until(lambda: cloud.views["spot-77"].state is MachineStatus.GONE)


async def test_a_launch_whose_answer_came_too_late_is_billed_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "CALL_TIMEOUT_S", 0.05)
    cloud = Cloud()

    def start_late(machine: str) -> None:
        time.sleep(0.2)
        cloud.start(machine)

    cloud.launching = start_late
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        bill = made.bill("spot-0")
        assert bill.state is BilledState.RUNNING
        assert bill.launched_at == pytest.approx(cloud.views["spot-0"].started_at or 0, abs=1e-6)


async def test_the_end_waits_for_a_launch_that_outlived_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "CALL_TIMEOUT_S", 0.05)
    cloud = Cloud()
    asked, may_start = threading.Event(), threading.Event()

    def start_late(machine: str) -> None:
        asked.set()
        may_start.wait(10)
        cloud.start(machine)

    cloud.launching = start_late
    async with fleet_on(tmp_path, cloud) as made:
        await until(asked.is_set)
        await asyncio.sleep(0.2)  # the call is given up, its thread goes on
        assert await made.fleet.end_all(0.3) == ["spot-0"]  # it may come yet: nobody says that all is gone
        may_start.set()
        assert await made.fleet.end_all(10) == []
        assert cloud.num_launched == 1
        assert cloud.views["spot-0"].state is MachineStatus.GONE
        assert made.book_state("spot-0") == "gone"


async def test_a_machine_that_is_gone_at_first_sight_is_billed_for_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "CALL_TIMEOUT_S", 0.05)
    cloud = Cloud()
    now = time.time()

    def live_unseen(machine: str) -> None:
        time.sleep(0.2)
        cloud.end(machine, started_at=now - 9, ended_at=now - 2)

    cloud.launching = live_unseen
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.book_state("spot-0") == "gone")
        assert made.bill("spot-0").cost_micro_usd == 7_000_000


async def test_the_end_waits_for_a_launch_under_way_and_for_a_cloud_that_does_not_answer(
    tmp_path: Path,
) -> None:
    cloud = Cloud()
    asked = threading.Event()
    failures = [OSError("down"), ProviderError("down", "wait"), TimeoutError()]

    def slow(machine: str) -> None:
        asked.set()
        time.sleep(0.7)  # longer than the cloud does not answer
        cloud.start(machine)

    def fail_at_first() -> None:
        if failures:
            raise failures.pop()

    cloud.launching = slow
    async with fleet_on(tmp_path, cloud) as made:
        await until(asked.is_set)
        cloud.after_list = fail_at_first
        made.driver.apply(RunEnding(made.driver.now(), "done"))
        assert await made.fleet.end_all(5.0) == []
        view = cloud.views["spot-0"]
        assert view.state is MachineStatus.GONE
        assert made.ledger.open_machines() == []
        assert made.bill("spot-0").ended_at == pytest.approx(view.ended_at or 0, abs=1e-6)


async def test_at_the_deadline_an_unknown_machine_counts_as_left(tmp_path: Path) -> None:
    cloud = Cloud()

    def fail() -> None:
        raise ProviderError("down", "wait")

    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        cloud.after_list = fail
        assert await made.fleet.end_all(0.2) == ["spot-0"]
        assert made.ledger.open_machines() == ["spot-0"]


class Silent(Cloud):
    """A cloud that sells nothing and never says what it has."""

    def offers(self) -> list[Offer]:
        return []

    def describe(self, run: str) -> list[MachineView]:
        raise CredentialsRejected("signed out", "sign in")


async def test_a_cloud_that_never_answers_keeps_no_other_clouds_machine_from_its_end(tmp_path: Path) -> None:
    cloud = Cloud()
    both = MultiProvider({"gcp": Silent(), "local": cloud})
    async with fleet_on(tmp_path, both, num_machines=2) as made:
        await until(lambda: len(made.ledger.running_machines()) == 2)
        made.ledger.intend(MachineRecord(
            "spot-77", pool="spot", provider="gcp", zone="zone", accelerator="cpu",
            price_micro_usd_per_hour=PRICE, price_source="test", intended_at=time.time(),
        ))  # fmt: skip
        made.ledger.launched("spot-77", time.time())
        made.fleet._bought.add("spot-77", Offer("gcp", "zone", "cpu", PRICE, True, "test"))
        cloud.end("spot-0", started_at=time.time(), ended_at=time.time())
        await until(lambda: made.book_state("spot-0") == "gone")
        cloud.views.pop("spot-1")
        await until(lambda: made.book_state("spot-1") == "gone")
        assert await made.fleet.end_all(0.5) == ["spot-77"], "nobody says that it is gone"
        assert all(view.state is MachineStatus.GONE for view in cloud.views.values())
        assert made.ledger.open_machines() == ["spot-77"]


@pytest.mark.parametrize(("provider", "age_s"), [("aws", 0.0), ("aws", 300.0), ("aws", 7200.0), ("gcp", 0.0)])
async def test_only_what_its_cloud_may_not_list_yet_is_waited_for_at_the_end(
    tmp_path: Path, provider: str, age_s: float
) -> None:
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud, num_machines=0) as made:
        launched_at = time.time() - age_s
        made.ledger.intend(MachineRecord(
            "spot-77", pool="spot", provider=provider, zone="zone", accelerator="cpu",
            price_micro_usd_per_hour=PRICE, price_source="test", intended_at=launched_at,
        ))  # fmt: skip
        made.ledger.launched("spot-77", launched_at)
        left = await made.fleet.end_all(0.3)
        may_be_young = provider == "aws" and age_s < 3600  # the wall clock may have been set since
        assert left == (["spot-77"] if may_be_young else [])
        assert made.ledger.open_machines() == left
        cloud.start("spot-77")
        assert await made.fleet.end_all(5) == []
        assert cloud.views["spot-77"].state is MachineStatus.GONE


async def test_a_closed_fleet_launches_nothing(tmp_path: Path) -> None:
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud, num_machines=2) as made:
        made.fleet.close()  # before the first command is carried out
        await asyncio.sleep(0.1)
        assert cloud.num_launched == 0
        assert made.ledger.open_machines() == []


async def test_launches_that_take_long_keep_no_end_waiting(tmp_path: Path) -> None:
    cloud = Cloud()
    may_start = threading.Event()
    asked: set[str] = set()

    def start_late(machine: str) -> None:
        asked.add(machine)
        may_start.wait(10)
        cloud.start(machine)

    cloud.launching = start_late
    cloud.start("spot-99")  # nobody knows it: it is ended at the first look
    async with fleet_on(tmp_path, cloud, num_machines=12) as made:
        try:
            await until(lambda: len(asked) == 12)
            await until(lambda: cloud.views["spot-99"].state is MachineStatus.GONE)
        finally:
            may_start.set()
        assert await made.fleet.end_all(10) == []


async def test_the_end_asks_for_all_machines_side_by_side(tmp_path: Path) -> None:
    cloud = Cloud()
    ended, all_asked = set(), threading.Event()

    def end_together(run: str, machine: str) -> None:
        ended.add(machine)
        if len(ended) == 4:
            all_asked.set()
        all_asked.wait(3)
        Cloud.terminate(cloud, run, machine)

    async with fleet_on(tmp_path, cloud, num_machines=4) as made:
        await until(lambda: cloud.num_launched == 4)
        cloud.terminate = end_together  # type: ignore[method-assign]
        began = time.monotonic()
        assert await made.fleet.end_all(10) == []
        assert time.monotonic() - began < 3
    assert ended == {"spot-0", "spot-1", "spot-2", "spot-3"}


async def test_offers_that_nobody_tells_let_the_machine_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "CALL_TIMEOUT_S", 0.05)
    cloud, go_on = Cloud(), threading.Event()

    def silent() -> list[Offer]:
        go_on.wait(5)
        return []

    cloud.offers = silent  # type: ignore[method-assign]
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: any(isinstance(event, LaunchFailed) for event in made.events))
        go_on.set()
        assert made.ledger.open_machines() == []


def intend_before_a_restart(tmp_path: Path, cloud: Cloud) -> None:
    """Leave the books of a coordinator that ended between an intent and its launch."""
    made = Made(tmp_path, cloud, None, 1)
    made.ledger.intend(MachineRecord(
        "spot-0", pool="spot", provider="local", zone="zone", accelerator="cpu",
        price_micro_usd_per_hour=PRICE, price_source="test", intended_at=time.time(),
    ))  # fmt: skip
    made.ledger.close()
    tmp_path.joinpath("journal").rmdir()


async def test_a_launch_from_before_a_restart_is_asked_for_only_where_it_was(tmp_path: Path) -> None:
    cloud = Cloud()
    asked = []

    def two_clouds() -> list[Offer]:
        return [
            Offer("cheap", "zone", "cpu", PRICE // 2, True, "test"),
            Offer("local", "other", "cpu", PRICE // 2, True, "test"),
            Offer("local", "zone", "cpu", PRICE, True, "test"),
        ]

    def remember(request: LaunchRequest) -> MachineView:
        asked.append((request.machine, request.offer.provider, request.offer.zone))
        return Cloud.launch(cloud, request)

    cloud.offers, cloud.launch = two_clouds, remember  # type: ignore[method-assign]
    intend_before_a_restart(tmp_path, cloud)
    async with fleet_on(tmp_path, cloud) as again:
        await until(lambda: again.core_state("spot-0") == "launched")
    assert asked == [("spot-0", "local", "zone")]


async def test_a_launch_from_before_a_restart_whose_place_sells_nothing_is_asked_for_nowhere_else(
    tmp_path: Path,
) -> None:
    cloud = Cloud()
    cloud.offers = lambda: [Offer("local", "other", "cpu", PRICE, True, "test")]  # type: ignore[method-assign]
    intend_before_a_restart(tmp_path, cloud)
    async with fleet_on(tmp_path, cloud) as again:
        again.fleet._bought.add("spot-0", Offer("local", "zone", "cpu", PRICE, True, "test"))
        await until(lambda: any(isinstance(event, LaunchFailed) for event in again.events))
        await until(lambda: again.book_state("spot-0") == "failed")
        assert "spot-0" not in cloud.views


async def test_where_no_spot_machine_is_to_be_had_only_the_floor_is_bought_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer_choice, "FIRST_PAUSE_S", 0.3)
    cloud = Cloud()
    asked: list[bool] = []

    def both() -> list[Offer]:
        return [
            Offer("local", "zone", "cpu", PRICE, True, "test"),
            Offer("local", "zone", "cpu", PRICE // 2, False, "test"),  # cheaper, and not taken for that
        ]

    def sell_on_demand_only(request: LaunchRequest) -> MachineView:
        asked.append(request.offer.spot)
        if request.offer.spot:
            raise NoCapacity("sold out", "wait")
        return Cloud.launch(cloud, request)

    cloud.offers, cloud.launch = both, sell_on_demand_only  # type: ignore[method-assign]
    async with fleet_on(tmp_path, cloud, num_machines=3, floor=1) as made:

        def ticked(condition: Callable[[], bool]) -> bool:
            made.driver.tick()
            return condition()

        await until(lambda: ticked(lambda: len(made.ledger.running_machines()) == 1))
        refused = len(asked)
        await until(lambda: ticked(lambda: len(asked) >= refused + 2))
        assert asked.count(False) == 1
        assert asked[0] is True, "spot machines are asked for first"


async def test_a_cloud_without_a_spot_market_fills_the_pool_on_demand(tmp_path: Path) -> None:
    cloud = Cloud()
    cloud.offers = lambda: [  # type: ignore[method-assign]
        Offer("local", "zone", "cpu", PRICE, False, "test", has_spot_market=False)
    ]
    async with fleet_on(tmp_path, cloud, num_machines=2) as made:
        await until(lambda: len(made.ledger.running_machines()) == 2)


async def test_a_restarted_coordinator_knows_what_its_machines_were_bought_as(tmp_path: Path) -> None:
    path = tmp_path / "cloud" / "bought.json"
    LaunchRecords(path).add(
        "spot-0", Offer("aws", "z", "H100:8", PRICE, False, "test", egress_micro_usd_per_gb=90_000)
    )
    again = LaunchRecords(path).get("spot-0")
    assert again is not None
    assert (again.egress_micro_usd_per_gb, again.spot) == (90_000, False)
    path.write_text("of another version")
    assert LaunchRecords(path).get("spot-0") is None


@pytest.mark.parametrize(("price", "paid"), [(PRICE // 2, PRICE // 2), (3 * PRICE, 2 * PRICE)])
async def test_a_price_that_rose_above_the_bid_is_billed_as_the_bid(
    tmp_path: Path, price: int, paid: int
) -> None:
    cloud = Cloud()
    offer = Offer("local", "zone", "cpu", PRICE, True, "test", max_price_micro_usd_per_hour=2 * PRICE)
    cloud.offers = lambda: [offer]  # type: ignore[method-assign]
    cloud.launching = lambda machine: cloud.views.__setitem__(
        machine,
        MachineView(
            machine, MachineStatus.RUNNING, time.time(), None, zone="zone-a", price_micro_usd_per_hour=price
        ),
    )
    async with fleet_on(tmp_path, cloud) as made:
        await until(lambda: made.book_state("spot-0") == "running")
        assert made.bill("spot-0").price_micro_usd_per_hour == paid


async def test_no_launch_goes_above_the_cap(tmp_path: Path) -> None:
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud, cap=2 * PRICE + 1, num_machines=3) as made:
        await until(lambda: any(isinstance(event, LaunchFailed) for event in made.events))
        await until(lambda: len(made.ledger.running_machines()) == 2)
        (refused,) = [event for event in made.events if isinstance(event, LaunchFailed)]
        assert "above max_usd_per_hour, $7,200.00" in refused.problem
        assert refused.retry_after_s > 0
        assert cloud.num_launched == 2


async def test_only_billed_machines_are_charged_with_waste(tmp_path: Path) -> None:
    cloud = Cloud()
    async with fleet_on(tmp_path, cloud) as refused:
        refused.fleet.close()
        refused.driver.apply(RunEnding(refused.driver.now(), "stopped"))  # terminating, and never intended
        meter = WasteMeter(refused.ledger, refused.driver.core, refused.driver.totals)
        for second in range(8):
            meter.advance(float(second))
        meter.flush()
        assert refused.ledger.wasted_ns() == {}


async def test_the_machine_whose_tokens_cost_least_is_bought_and_the_core_is_told_what_it_is(
    tmp_path: Path,
) -> None:
    cloud = Cloud()
    small = Offer("local", "zone", "L4:1", PRICE // 8, True, "test")
    large = Offer("local", "zone", "H100:2", PRICE, True, "test", instance_type="large")
    cloud.offers = lambda: [small, large]  # type: ignore[method-assign]
    job = Job(name="j", model=TinyModel(init="tiny"), data=ReasoningGym(reasoning_gym=["spell_backward"]))
    async with fleet_on(tmp_path, cloud, job=job) as made:
        await until(lambda: made.core_state("spot-0") == "launched")
        assert made.bill("spot-0").accelerator == "H100:2", "22 times the bandwidth for 8 times the price"
        kind = made.driver.core.machines["spot-0"].kind
        assert kind == MachineKind("H100", 2, 3.35e12, "local/zone")
        assert made.driver.core.measured().places.keys() == {"local/zone"}
