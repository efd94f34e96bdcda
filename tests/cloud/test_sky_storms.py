"""Seeded storms over the real SkyPilot: whatever fails, nothing is left or bought twice, and the bill fits.

A real fleet controller with its core and ledger buys through SkyPilot from the lab's cloud, while a seed
decides what fails: regions without capacity, reclaims in every phase of a boot, SkyPilot's child or its API
server killed, a second launcher of the same machine, an end in the middle of a launch, a head that dies.
RLBOOST_SKY_SEEDS sets how many seeds are tried (`make soak-cloud`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
import pytest
from cloudlab.catalogue import REGIONS
from cloudlab.client import Lab
from cloudlab.machine import GATEWAY

from rlboost_providers.base.provider import LaunchRequest
from rlboost_providers.skypilot.provider import SkyPilotProvider
from rlboost_providers.skypilot.session import SkyPilotSweeper
from rlboost_runtime.agent.bootstrap import Bootstrap
from rlboost_runtime.coordinator.fleet import offer_choice
from rlboost_runtime.coordinator.fleet.controller import MachineMaker
from rlboost_runtime.engines.base import EngineSettings
from rlboost_runtime.errors import NotYet, RLBoostError
from rlboost_runtime.job import CloudOffer
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.security import create_secrets
from tests.cloud.conftest import skypilot_sessions
from tests.integration.storm_books import check_books, hold_to_budget
from tests.unit.coordinator.test_fleet import Made, fleet_on

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200, func_only=True)]

SEEDS = int(os.environ.get("RLBOOST_SKY_SEEDS", "2"))
RUN = "run"
STORM_S = 100.0
"""Longest storm: a launch takes a minute on two cores, so that a storm ends before, within and after one."""
END_S = 300.0


@dataclass
class Storm:
    """What the seed may do, and what it did."""

    lab: Lab
    home: Path
    run: Path
    dice: random.Random
    num_before: int
    done: Counter[str] = field(default_factory=Counter)

    def provider(self) -> SkyPilotProvider:
        return SkyPilotProvider(self.run, [CloudOffer(infra="aws", accelerators="A10G:1")])

    def machines(self) -> list[dict]:
        return [m for m in self.lab.machines()[self.num_before :] if m["is_spot"]]

    def living(self) -> list[dict]:
        return [m for m in self.machines() if m["ended_at"] is None]

    def trouble(self) -> None:
        kind = self.dice.choice(["refuse", "allow", "reclaim", "reclaim", "child", "server"])
        match kind:
            case "refuse":
                self.lab.ask("refuse", regions=self.dice.sample(REGIONS, self.dice.randint(1, len(REGIONS))))
            case "allow":
                self.lab.ask("refuse", regions=[])
            case "reclaim":
                if not (living := self.living()):
                    return
                self.lab.ask(
                    kind, id=self.dice.choice(living)["id"], how=self.dice.choice(["reset", "silent"])
                )
            case "child":
                _kill(
                    [
                        child
                        for child in psutil.Process().children()
                        if "child.py" in " ".join(child.cmdline())
                    ]
                )
            case "server":
                _kill([psutil.Process(pid) for pid in skypilot_sessions(self.home)])
        self.done[kind] += 1


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name in ("FIRST_PAUSE_S", "ERROR_PAUSE_S", "QUOTA_PAUSE_S", "CREDENTIALS_PAUSE_S", "NOTHING_PAUSE_S"):
        monkeypatch.setattr(offer_choice, name, 2.0)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_fails_nothing_is_left_or_bought_twice_and_the_bill_fits(
    lab: Lab, sky_user: dict[str, str], tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    folder = tmp_path / RUN
    folder.mkdir()
    create_secrets(RunFolder(folder))
    lab.ask("refuse", regions=[])
    storm = Storm(lab, Path(sky_user["HOME"]), folder, dice, len(lab.machines()))
    provider = storm.provider()
    began = time.monotonic()
    try:
        await wait_for_skypilot(provider)
        await rage(storm, provider)
    finally:
        provider.close()
    told = {"seed": seed, "seconds": round(time.monotonic() - began), "bought": len(storm.machines())}
    print(json.dumps({**told, "faults": dict(storm.done)}))


async def rage(storm: Storm, provider: SkyPilotProvider) -> None:
    dice = storm.dice
    budget = dice.choice([20_000, 40_000, 80_000])  # micro-dollars; a minute of a machine is some 6,500
    async with fleet_on(storm.run, provider, num_machines=dice.randint(1, 2)) as made:
        hold_to_budget(made, budget)
        made.fleet._maker = MachineMaker(RUN, lambda name: bootstrap(storm.run, name))
        ends_at = time.monotonic() + STORM_S * dice.uniform(0.1, 1.0)
        while time.monotonic() < ends_at:
            made.driver.tick()
            made.driver.core.check()
            await asyncio.sleep(dice.uniform(0.5, 3.0))
            if dice.random() < 0.15:
                await asyncio.to_thread(storm.trouble)
            if dice.random() < 0.05:
                await launch_again(storm, made)
        await asyncio.to_thread(storm.lab.ask, "refuse", regions=[])
        if dice.random() < 0.5:
            assert await made.fleet.end_all(END_S) == []
        else:
            await made.fleet.end_all(0.5)  # it gives up: what is left is for `gc`
            await wait_for_launches(made)
            await asyncio.to_thread(sweep, storm)
            assert await made.fleet.end_all(END_S) == []
            storm.done["gc"] += 1
        deadline = time.monotonic() + 15  # the lab takes a moment to see what its API was told
        while living := storm.living():
            assert time.monotonic() < deadline, f"machines are left: {living}"
            await asyncio.sleep(0.2)
        bought = [m["tags"]["rlboost-machine"] for m in storm.machines()]
        assert check_books(made, budget, bought) >= set(bought), "the ledger does not know of a machine"


def bootstrap(run: Path, machine: str) -> dict[str, object]:
    """An agent's, whose head does not answer: it goes on dialling."""
    made = Bootstrap(
        run=RUN,
        machine=machine,
        pool="spot",
        instances=(f"{machine}/0",),
        coordinator_url=f"https://{GATEWAY}:9",
        token="token",
        certificate=RunFolder(run).certificate.read_text(),
        engine=EngineSettings("transformers", Sampling(), 64, 1, "float32", 0),
    )
    return msgspec.to_builtins(made)


async def wait_for_skypilot(provider: SkyPilotProvider) -> None:
    async with asyncio.timeout(END_S):
        while True:
            with contextlib.suppress(NotYet):
                await asyncio.to_thread(provider.offers)
                return


async def launch_again(storm: Storm, made: Made) -> None:
    """A second launcher asks for a machine that the first one has asked for."""
    asked = made.ledger.open_machines()
    if not asked:
        return
    second = storm.provider()
    try:
        offers = await asyncio.to_thread(second.offers)
        request = LaunchRequest(RUN, asked[-1], offers[0], bootstrap(storm.run, asked[-1]))
        await asyncio.to_thread(second.launch, request)
        storm.done["launched again"] += 1
    except RLBoostError:
        return
    finally:
        second.close()


async def wait_for_launches(made: Made) -> None:
    async with asyncio.timeout(END_S):
        while made.fleet._launching or made.fleet._busy:  # noqa: ASYNC110 threads end it
            await asyncio.sleep(0.2)


def sweep(storm: Storm) -> None:
    """What `rlboost gc` does with a run that nobody knows any more."""
    sweeper = SkyPilotSweeper(storm.run.parent / "gc")
    deadline = time.monotonic() + END_S
    try:
        while True:
            try:
                for owned in sweeper.sweep():
                    if owned.run == RUN:
                        sweeper.end(owned)
                return
            except NotYet:
                assert time.monotonic() < deadline
    finally:
        sweeper.close()
