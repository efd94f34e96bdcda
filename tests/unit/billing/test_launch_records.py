"""What is on record of machines that were bought: the head's, and the offers of spot machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlboost_providers.base.provider import MachineStatus, MachineView, Offer
from rlboost_providers.base.traits import provider_traits
from rlboost_runtime.billing.launch_records import (
    HeadMachine,
    LaunchBackup,
    LaunchRecords,
    MachineRecord,
    current_head_machine,
    end_of,
    keep_head_machine,
    kept_head_machines,
    own_head_machine,
    price_paid,
    start_of,
)
from rlboost_runtime.core.base.messages import Pool
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import RunFolder

OFFER = Offer(
    "aws", "us-east-1", "H100:8", 5_000_000, spot=True, source="catalogue", storage_micro_usd_per_hour=70
)
HEAD = HeadMachine("head-1", "aws", "us-east-1a", "H100:8", 9_000_000, "catalogue", 100.0)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "home" / "runs" / "one")
    folder.path.mkdir(parents=True)
    return folder


def view(**known: object) -> MachineView:
    return replace(MachineView("m", MachineStatus.RUNNING, None, None), **known)


def test_an_intent_is_to_pay_what_the_offer_may_cost_at_most() -> None:
    record = MachineRecord.of(
        "spot-1", replace(OFFER, dearest_micro_usd_per_hour=6_000_000, min_billed_s=30), 7.5
    )
    assert record == MachineRecord(
        "spot-1", "aws", "us-east-1", "H100:8", 6_000_000, "catalogue", 7.5,
        storage_micro_usd_per_hour=70, min_billed_s=30,
    )  # fmt: skip
    assert record.all_micro_usd_per_hour == 6_000_070
    assert record.pool == Pool.SPOT
    assert record.min_billed_ns == 30_000_000_000
    known = provider_traits("aws").min_billed_s
    assert replace(record, min_billed_s=None).min_billed_ns == known * 1_000_000_000
    assert replace(record, min_billed_s=0).min_billed_ns == 0


def test_a_launched_machine_has_its_clouds_zone_and_start_or_what_was_known() -> None:
    record = MachineRecord.of("spot-1", OFFER, 7.5)
    found = record.launched(view(zone="us-east-1c", started_at=9.0), 20.0)
    assert (found.zone, found.launched_at) == ("us-east-1c", 9.0)
    found = record.launched(view(), 20.0)
    assert (found.zone, found.launched_at) == ("us-east-1", 20.0)
    assert found.launched(view(), 30.0).launched_at == 20.0
    assert found.launched(view(started_at=25.0), 30.0).launched_at == 25.0


def test_a_machine_may_be_unlisted_for_as_long_as_its_clouds_lists_lag() -> None:
    record = MachineRecord.of("spot-1", OFFER, 100.0)
    assert record.may_be_unlisted(109.9, 10.0)
    assert not record.may_be_unlisted(110.0, 10.0)
    assert replace(record, launched_at=105.0).may_be_unlisted(114.9, 10.0)


def test_times_and_prices_are_the_clouds_where_it_tells_them() -> None:
    assert (start_of(view(), 9.0), start_of(view(started_at=3.0), 9.0)) == (9.0, 3.0)
    assert (end_of(view(), 9.0), end_of(view(ended_at=4.0), 9.0), end_of(None, 9.0)) == (9.0, 4.0, 9.0)
    bid = replace(OFFER, max_price_micro_usd_per_hour=4_000_000)
    assert price_paid(OFFER, view(price_micro_usd_per_hour=4_500_000)) == 4_500_000
    assert price_paid(bid, view(price_micro_usd_per_hour=4_500_000)) == 4_000_000
    assert price_paid(bid, view(price_micro_usd_per_hour=3_500_000)) == 3_500_000
    assert price_paid(bid, view()) is None


def test_a_heads_machines_are_kept_in_order_and_the_last_one_is_current(run: RunFolder) -> None:
    assert kept_head_machines(run) == []
    assert current_head_machine(run) is None
    later = replace(HEAD, machine="head-2", stays_s=600.0)
    keep_head_machine(run, HEAD)
    keep_head_machine(run, later)
    assert current_head_machine(run) == later
    ended = replace(HEAD, ended_at=500.0, is_end_guessed=True)
    keep_head_machine(run, ended)
    assert kept_head_machines(run) == [later, ended]


@pytest.mark.parametrize("content", ['[{"machine": 3}]', "[{", '{"machine": "head-1"}'])
def test_a_record_that_cannot_be_read_says_whose_and_what_to_do(run: RunFolder, content: str) -> None:
    run.head_machines.write_text(content)
    with pytest.raises(RuntimeFault) as found:
        kept_head_machines(run)
    assert "does not say what was rented for one" in found.value.problem
    assert str(run.head_machines) in found.value.problem
    assert "rlboost gc finds the machine itself" in found.value.remedy


def test_the_heads_own_record_is_that_of_the_home_it_lies_in(run: RunFolder) -> None:
    assert own_head_machine(run) is None
    path = run.path.parents[1] / "rental.json"
    path.write_text(json.dumps({**{name: getattr(HEAD, name) for name in HeadMachine.__dataclass_fields__}}))
    assert own_head_machine(run) == HEAD
    for content in ('{"machine": 3}', "{"):
        path.write_text(content)
        assert own_head_machine(run) is None, "it is logged"


def test_offers_are_kept_through_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "cloud" / "bought.json"
    records = LaunchRecords(path)
    assert records.get("spot-1") is None
    records.add("spot-1", OFFER)
    records.add("spot-2", replace(OFFER, zone="b"))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    again = LaunchRecords(path)
    assert again.offers() == records.offers() == {"spot-1": OFFER, "spot-2": replace(OFFER, zone="b")}
    written = path.stat().st_mtime_ns, path.stat().st_ino
    records.add("spot-1", OFFER)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written, "known: not written again"
    records.add("spot-1", replace(OFFER, zone="c"))
    assert LaunchRecords(path).offers()["spot-1"].zone == "c"
    path.write_text("another version's")
    assert LaunchRecords(path).offers() == {}
    assert LaunchRecords(None).offers() == {}
    records = LaunchRecords(None)
    records.add("spot-1", OFFER)
    assert records.get("spot-1") == OFFER


def test_the_copy_in_the_output_is_what_was_bought(run: RunFolder, tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert not LaunchBackup(run, None).put()
    assert LaunchBackup(run, None).read() is None
    backup = LaunchBackup(run, str(output))
    assert backup.read() is None
    assert not backup.put(), "nothing was bought yet: logged"
    path = run.path / "cloud" / "bought.json"
    LaunchRecords(path).add("spot-1", OFFER)
    assert backup.put()
    assert backup.read() == path.read_bytes()
    assert [each.read_bytes() for each in output.rglob("bought.json")] == [path.read_bytes()]
    LaunchRecords(path).add("spot-2", OFFER)
    assert backup.put()
    assert backup.read() == path.read_bytes()
