"""Spot machines elsewhere dial the head's public address; processes on the head never do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rlboost_runtime.coordinator.links.server import bind
from rlboost_runtime.job import CloudOffer, Trainer
from rlboost_runtime.run import head
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.head import HeadAddress, address_of_head, url_for, write_address
from rlboost_runtime.weights.serve.server import bind as bind_weights


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / "run"
    folder.mkdir()
    return RunFolder(folder)


def test_without_an_address_only_this_machine_is_served(run):
    with bind(run) as control, bind_weights(run) as data:
        assert control.getsockname()[0] == data.getsockname()[0] == "127.0.0.1"
    assert read_json(run.endpoint) == {"url": f"https://127.0.0.1:{_port(run)}"}


def test_with_an_address_both_ports_are_open_and_each_peer_gets_the_right_one(run):
    free = _free_port()
    write_address(run, HeadAddress("10.1.2.3", control_port=free))
    with bind(run) as control, bind_weights(run) as data:
        assert control.getsockname() == ("0.0.0.0", free)
        assert data.getsockname()[0] == "0.0.0.0"
    known = read_json(run.endpoint)
    assert url_for(known, on_head=False) == f"https://10.1.2.3:{free}"
    assert url_for(known, on_head=True) == f"https://127.0.0.1:{free}"


def test_a_restarted_server_keeps_the_port_that_machines_know(run):
    write_address(run, HeadAddress("10.1.2.3"))
    with bind(run) as first:
        port = first.getsockname()[1]
    with bind(run) as second:
        assert second.getsockname()[1] == port


def _port(run: RunFolder) -> int:
    return int(read_json(run.endpoint)["url"].rsplit(":", 1)[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_head_is_reached_where_its_job_says_or_in_its_own_network_by_nodes_that_it_buys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "private_address", lambda: "10.0.0.5")
    offer = CloudOffer(infra="aws/us-east-1", accelerators="H100:8", via="direct")
    assert address_of_head(Trainer()) is None
    assert address_of_head(Trainer(address="gpu-1")) == HeadAddress("gpu-1")
    assert address_of_head(Trainer(nodes=2, node_offer=offer)) == HeadAddress("10.0.0.5")
    named = Trainer(nodes=2, node_offer=offer, address="gpu-1", control_port=7410, bytes_port=7411)
    assert address_of_head(named) == HeadAddress("gpu-1", 7410, 7411)
