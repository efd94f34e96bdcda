"""The trainer's further nodes: bought once, bought again when lost, never two machines for one node."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rlboost_providers.base.provider import LaunchRequest, MachineStatus, MachineView, Offer
from rlboost_runtime.coordinator.fleet import controller as fleet_module
from rlboost_runtime.coordinator.fleet import offer_choice
from rlboost_runtime.coordinator.fleet.reserved_nodes import (
    AGAIN_S,
    AWAY_S,
    JOIN_S,
    SILENT_S,
    ReservedNodes,
)
from rlboost_runtime.core.base.messages import InstanceJoined, LaunchMachine, Pool, TerminateMachine
from rlboost_runtime.errors import NoCapacity, ProviderError
from rlboost_runtime.run.reserved import is_reserved, node_machine, node_of
from tests.unit.coordinator.test_fleet import PRICE, Cloud, fleet_on, quick, until

__all__ = ["quick"]  # the fixture of both files


class TrainingCloud(Cloud):
    """It also sells nodes, beside the head and dearer than spot machines."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[LaunchRequest] = []

    def offers(self) -> list[Offer]:
        node = Offer("local", "beside the head", "H100:8", 4 * PRICE, False, "test", is_for_trainer=True)
        return [*super().offers(), node]

    def launch(self, request: LaunchRequest) -> MachineView:
        self.requests.append(request)
        return super().launch(request)


def names(cloud: TrainingCloud) -> list[str]:
    return [request.machine for request in cloud.requests]


@pytest.mark.parametrize("number", [1, 3, 12])
@pytest.mark.parametrize("life", [1, 2, 40])
def test_a_machines_name_says_which_node_it_is(number: int, life: int) -> None:
    assert node_of(node_machine(number, life)) == (number, life)
    assert is_reserved(node_machine(number, life))


@pytest.mark.parametrize("machine", ["reserved-0", "spot-1", "reserved-x", "reserved-1-0", "reserved-01"])
def test_other_machines_are_no_nodes(machine: str) -> None:
    assert node_of(machine) is None
    assert is_reserved(machine) == (machine == "reserved-0")


async def test_nodes_are_bought_beside_the_head_as_reserved_machines_and_spot_ones_as_before(
    tmp_path: Path,
) -> None:
    cloud = TrainingCloud()
    async with fleet_on(tmp_path, cloud, num_nodes=2) as made:
        await until(lambda: {*cloud.views} == {"spot-0", "reserved-1", "reserved-2"})
        await asyncio.sleep(0.2)
        bought = {request.machine: request.offer.is_for_trainer for request in cloud.requests}
        assert bought == {"spot-0": False, "reserved-1": True, "reserved-2": True}
        assert cloud.num_launched == 3, "each once, and none is taken for unwanted"
        assert made.bill("reserved-1").pool == Pool.RESERVED
        assert made.bill("spot-0").pool == Pool.SPOT
        assert "reserved-1" not in made.driver.core.machines, "no matter of the core"
        assert made.ledger.rate_micro_usd_per_hour() == 9 * PRICE
        assert await made.fleet.end_all(5) == []
    assert all(view.state is MachineStatus.GONE for view in cloud.views.values())


async def test_a_node_that_is_lost_is_billed_to_its_end_and_replaced_under_another_name(
    tmp_path: Path,
) -> None:
    cloud = TrainingCloud()
    async with fleet_on(tmp_path, cloud, num_machines=0, num_nodes=1) as made:
        await until(lambda: made.book_state("reserved-1") == "running")
        cloud.end("reserved-1", started_at=time.time() - 60, ended_at=time.time())
        await until(lambda: made.book_state("reserved-1-2") == "running")
        assert made.book_state("reserved-1") == "gone"
        assert names(cloud) == ["reserved-1", "reserved-1-2"]


@pytest.mark.parametrize("error", [NoCapacity("sold out", "wait"), ProviderError("lost", "ask again")])
async def test_a_launch_that_fails_is_repeated_under_the_same_name(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "RETRY_ERROR_S", 0.05)
    monkeypatch.setattr(offer_choice, "ERROR_PAUSE_S", 0.05)
    monkeypatch.setattr(offer_choice, "FIRST_PAUSE_S", 0.05)
    cloud, refused = TrainingCloud(), []

    def refuse_twice(machine: str) -> None:
        refused.append(machine)
        if len(refused) < 3:
            raise error
        cloud.start(machine)

    cloud.launching = refuse_twice
    async with fleet_on(tmp_path, cloud, num_machines=0, num_nodes=1) as made:
        await until(lambda: made.book_state("reserved-1") == "running", 20)
        assert refused == ["reserved-1"] * 3
        assert made.ledger.rate_micro_usd_per_hour() == 4 * PRICE


async def test_a_node_has_joined_once_an_engine_of_it_is_connected(tmp_path: Path) -> None:
    cloud = TrainingCloud()
    async with fleet_on(tmp_path, cloud, num_machines=0, num_nodes=2) as made:
        await until(lambda: len(cloud.views) == 2)
        assert made.fleet.joined_nodes() == []
        now, driver = made.driver.now(), made.driver
        driver.apply(InstanceJoined(now, "reserved-2/0", "reserved-2", Pool.RESERVED, 1, 4, 1000))
        await until(lambda: made.fleet.joined_nodes() == ["reserved-2"])


def commands(nodes: ReservedNodes, now: float, *joined: str) -> list[Any]:
    return nodes.due(now, joined)


def test_a_node_that_never_dials_in_or_falls_silent_is_ended_and_replaced_once_it_is_gone() -> None:
    nodes = ReservedNodes(1)
    assert commands(nodes, 0.0) == [LaunchMachine("reserved-1")]
    assert commands(nodes, 1.0) == [], "it is being launched"
    nodes.came("reserved-1", 5.0)
    assert commands(nodes, JOIN_S) == []
    (ending,) = commands(nodes, JOIN_S + 6)
    assert isinstance(ending, TerminateMachine)
    assert ending.machine == "reserved-1"
    assert commands(nodes, JOIN_S + 7) == [], "not again at once"
    assert len(commands(nodes, JOIN_S + 7 + AGAIN_S)) == 1, "until it is gone"
    nodes.gone("reserved-1")
    assert "reserved-1" not in nodes, "its agents are refused from now on"
    at = 2 * JOIN_S
    assert commands(nodes, at) == [LaunchMachine("reserved-1-2")]
    nodes.came("reserved-1-2", at)
    assert commands(nodes, at + 100, "reserved-1-2") == []
    assert commands(nodes, at + 99 + SILENT_S) == []
    assert [type(each) for each in commands(nodes, at + 101 + SILENT_S)] == [TerminateMachine]


def test_after_a_restart_what_may_be_there_is_kept_and_what_ended_is_followed() -> None:
    books = ["reserved-0", "spot-1", "reserved-1", "reserved-1-2", "reserved-2", "reserved-3"]
    nodes = ReservedNodes(2, books, ["reserved-0", "reserved-1-2"], 50.0)
    assert nodes.machines == ["reserved-1-2", "reserved-2-2"]
    assert nodes.launched == ["reserved-1-2"], "asked of its cloud's lists, not launched again"
    assert commands(nodes, 60.0) == [LaunchMachine("reserved-2-2")]
    assert "reserved-0" in nodes
    assert "reserved-3" not in nodes, "the job has fewer nodes now"


def test_a_node_is_there_until_its_engines_were_away_for_a_while_or_its_machine_is_gone() -> None:
    nodes = ReservedNodes(2)
    commands(nodes, 0.0)
    for machine in ("reserved-1", "reserved-2"):
        nodes.came(machine, 5.0)
    assert nodes.there(5.0) == []
    commands(nodes, 10.0, "reserved-1", "reserved-2")
    assert nodes.there(10.0 + AWAY_S) == ["reserved-1", "reserved-2"], "an agent may restart"
    assert nodes.there(10.1 + AWAY_S) == []
    nodes.gone("reserved-1")
    assert nodes.there(11.0) == ["reserved-2"]


def test_after_the_coordinators_restart_the_nodes_that_were_there_are_still() -> None:
    books = ["reserved-1", "reserved-2", "reserved-3"]
    nodes = ReservedNodes(3, books, ["reserved-1", "reserved-2"], 50.0, ["reserved-1", "reserved-3"])
    assert nodes.there(51.0) == ["reserved-1"], "the second had not joined, the third has ended"
    assert nodes.there(51.0 + AWAY_S) == []
