"""Who may pull from whom, what a status shows of it, and what it costs."""

from __future__ import annotations

import sqlite3
import string
from pathlib import Path

from rlboost_runtime.billing.accounts import UsageKind
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.ledger_file import Route
from rlboost_runtime.coordinator.links.weights import MAX_PEERS, WeightTracker
from rlboost_runtime.protocol.messages import (
    InstanceReadyMessage,
    LoadVersionMessage,
    PeerListening,
    VersionPublishedMessage,
)

Moved = list[tuple[str, str, str, int]]


def desk_with(*names: str, moved: Moved | None = None) -> WeightTracker:
    """Instances a/0, b/0, ... on machines whose first letter is their zone."""
    desk = WeightTracker(
        lambda machine: machine[0], lambda *each: None if moved is None else moved.append(each)
    )
    for name in names:
        desk.listening(name, name.split("/")[0], PeerListening(f"https://{name}", "PEM"))
    return desk


def names(load: LoadVersionMessage) -> list[str]:
    return [peer.instance for peer in load.peers]


def test_instances_hear_of_the_others_in_their_zone_and_have_a_slice_each() -> None:
    desk = desk_with("a1/0", "a2/0", "b1/0", "a3/0")
    first, second = desk.load("a1/0", "a1", 7), desk.load("a2/0", "a2", 7)
    assert names(first) == ["a2/0", "a3/0"]
    assert names(second) == ["a3/0", "a1/0"]
    assert [first.part, second.part] == [(0, 3), (1, 3)]
    assert desk.load("b1/0", "b1", 7) == LoadVersionMessage(7)


def test_engines_of_one_machine_share_a_slice_and_pull_from_other_machines_only() -> None:
    desk = desk_with("a1/0", "a1/1", "a2/0", "a2/1")
    loads = {name: desk.load(name, name[:2], 7) for name in ("a1/0", "a1/1", "a2/0", "a2/1")}
    assert {name: load.part for name, load in loads.items()} == {
        "a1/0": (0, 2), "a1/1": (0, 2), "a2/0": (1, 2), "a2/1": (1, 2),
    }  # fmt: skip
    assert names(loads["a1/1"]) == ["a2/0", "a2/1"]
    assert desk_with("a1/0", "a1/1").load("a1/0", "a1", 7) == LoadVersionMessage(7)


def test_one_that_does_not_listen_takes_no_slice() -> None:
    desk = desk_with("a1/0", "a2/0")
    load = desk.load("a9/0", "a9", 7)
    assert names(load) == ["a1/0", "a2/0"]
    assert load.part == (0, 0)


def test_the_number_of_peers_is_bounded() -> None:
    desk = desk_with(*(f"a{i:02}/0" for i in range(30)))
    assert len(desk.load("a05/0", "a05", 7).peers) == MAX_PEERS


def test_a_peer_that_two_others_cannot_reach_stays_a_leaf_until_it_says_something_new() -> None:
    desk = desk_with("a1/0", "a2/0", "a3/0")
    for pull_s in (1.0, 2.0):
        desk.ready("a1/0", "a1", InstanceReadyMessage(1, pull_s=pull_s, complaints={"a3/0": "refused"}))
    assert "a3/0" in names(desk.load("a1/0", "a1", 2))
    desk.ready("a2/0", "a2", InstanceReadyMessage(1, complaints={"a3/0": "refused", "head": "x"}))
    assert names(desk.load("a1/0", "a1", 2)) == ["a2/0"]
    assert desk.load("a3/0", "a3", 2).part == (0, 0)
    assert desk.as_json()["leaves"] == ["a3/0"]
    desk.listening("a3/0", "a3", PeerListening("https://a3/0", "PEM"))  # the same again
    assert desk.as_json()["leaves"] == ["a3/0"]
    desk.listening("a3/0", "a3", PeerListening("https://a3/0:2", "PEM"))
    assert desk.as_json()["leaves"] == []


def test_one_that_is_gone_is_forgotten() -> None:
    desk = desk_with("a1/0", "a2/0")
    desk.forget("a2/0")
    desk.forget("a2/0")
    assert desk.load("a1/0", "a1", 1) == LoadVersionMessage(1)


def test_figures_of_a_version_add_up() -> None:
    moved: Moved = []
    desk = desk_with(moved=moved)
    desk.published(VersionPublishedMessage(3, "d" * 64, 1000, 2.0, stop_s=0.5, delta_bytes=40))
    assert desk.load("a1/0", "a1", 3).digest == "d" * 64
    desk.ready("a1/0", "a1", InstanceReadyMessage(3, 40, 1.5, 0.5, how="delta", sources={"head": 40}))
    sources = {"head": 300, "a1/0": 600, "bucket": 100}
    ready = InstanceReadyMessage(3, 1000, 3.5, how="full", pause_s=0.2, sources=sources)
    for _ in range(2):  # a fact is repeated after a reconnection
        desk.ready("a2/0", "a2", ready)
    desk.ready("r/0", "r", InstanceReadyMessage(3, how="linked"))
    (version,) = desk.as_json()["versions"]
    assert version == {
        "version": 3,
        "full_bytes": 1000,
        "delta_bytes": 40,
        "stop_s": 0.5,
        "publish_s": 2.0,
        "wire_bytes": {"head": 340, "peers": 600, "bucket": 100},
        "pulls": {"delta": 1, "full": 1, "linked": 1},
        "slowest_pull_s": 3.5,
        "longest_pause_s": 0.5,
    }
    assert [each[1:] for each in moved if each[2] == "peers"] == [("a2", "peers", 600)]
    assert len({transfer for transfer, *_ in moved}) == 4


def test_old_figures_are_dropped() -> None:
    desk = desk_with()
    for version in range(100):
        desk.published(VersionPublishedMessage(version, "", 1, 0.0))
    shown = [each["version"] for each in desk.as_json()["versions"]]
    assert shown == list(range(80, 100))


def ledger_with(path: Path, **prices: int) -> Ledger:
    """Machines in the zones that they are called after, with what a gigabyte costs in micro-dollars."""
    ledger = Ledger(path)
    for machine, price in prices.items():
        ledger.intend(MachineRecord(
            machine, pool="spot", provider="aws", zone=f"us-{machine.rstrip(string.digits)}",
            accelerator="H100:1", price_micro_usd_per_hour=1, price_source="test", intended_at=1.0,
        ))  # fmt: skip
        ledger.set_egress_price(machine, price)
    return ledger


def test_egress_is_billed_to_the_micro_dollar(tmp_path: Path) -> None:
    ledger = ledger_with(tmp_path / "ledger.sqlite", far=90_000, near=0)
    for number in range(40):
        ledger.add_egress(f"far {number}", "far", "head", 16_400_123, 1.0)
    for number, (machine, source) in enumerate([("far", "peers"), ("near", "head"), ("unknown", "head")]):
        ledger.add_egress(f"free {number}", machine, source, 10**12, 1.0)
    total = 40 * 16_400_123 * 90_000 // 10**9
    assert ledger.spending().usage(2.0)[UsageKind.EGRESS] == total
    assert ledger.egress_routes() == [Route("head", "aws/us-far", 40 * 16_400_123, total)]
    ledger.close()


def test_a_pull_that_is_told_to_the_next_coordinator_too_is_billed_once(tmp_path: Path) -> None:
    ready = InstanceReadyMessage(3, 10**9, 3.5, how="full", sources={"head": 9 * 10**8, "bucket": 10**8})
    path = tmp_path / "ledger.sqlite"
    ledger_with(path, far=90_000).close()
    for _ in range(2):
        ledger = Ledger(path)

        def bill(transfer: str, machine: str, source: str, num: int, book: Ledger = ledger) -> None:
            book.add_egress(transfer, machine, source, num, 1.0)

        desk = WeightTracker(ledger.zone_of, bill)
        desk.ready("far/0", "far", ready)
        desk.ready("far/0", "far", ready)
        ledger.close()
    ledger = Ledger(path)
    assert ledger.spending().usage(2.0)[UsageKind.EGRESS] == 90_000
    assert [route.source for route in ledger.egress_routes()] == ["head", "bucket"]
    ledger.close()


def test_the_next_coordinator_knows_zones_and_has_no_peers_in_unknown_ones(tmp_path: Path) -> None:
    ledger_with(tmp_path / "ledger.sqlite", here=0, here2=0, there=0).close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    desk = WeightTracker(ledger.zone_of)
    for machine in ("here", "there", "lost1", "lost2"):
        desk.listening(f"{machine}/0", machine, PeerListening(f"https://{machine}", "PEM"))
    assert [names(desk.load(f"{m}/0", m, 1)) for m in ("here", "there", "lost1")] == [[], [], []]
    desk.listening("here2/0", "here2", PeerListening("https://here2", "PEM"))
    assert names(desk.load("here/0", "here", 1)) == ["here2/0"]
    ledger.close()


def test_a_ledger_from_before_there_were_transfers_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger_with(path).close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE egress")
        db.execute("DROP TABLE egress_prices")
    ledger = ledger_with(path, far=90_000)
    assert ledger.add_egress("1", "far", "head", 10**9, 1.0) == 90_000
    ledger.close()
