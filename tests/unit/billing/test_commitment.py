"""Money as good as spent, and the least that a cloud bills."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost_runtime.billing.accounts import (
    CLOUD_WIND_DOWN_S,
    LOCAL_WIND_DOWN_S,
    committed_micro_usd,
    least_micro_usd,
    stay_micro_usd,
    to_ns,
)
from rlboost_runtime.billing.launch_records import HeadMachine, MachineRecord
from rlboost_runtime.billing.ledger import Ledger

A_DOLLAR_A_SECOND = 3_600_000_000


@pytest.fixture
def ledger(tmp_path: Path):
    made = Ledger(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def intend(ledger: Ledger, machine: str, provider: str, min_billed_s: int | None = None) -> None:
    ledger.intend(
        MachineRecord(
            machine,
            pool="spot",
            provider=provider,
            zone="z",
            accelerator="H100:8",
            price_micro_usd_per_hour=A_DOLLAR_A_SECOND,
            price_source="test",
            intended_at=1000.0,
            min_billed_s=min_billed_s,
        )
    )


def committed_usd(ledger: Ledger, now: float) -> float:
    return committed_micro_usd(ledger.machines(now), to_ns(now)) / 1e6


def test_a_young_machine_commits_the_rest_of_its_first_minute_and_an_old_one_its_end(ledger: Ledger) -> None:
    intend(ledger, "spot-0", "aws")
    assert committed_usd(ledger, 1000.0) == 60.0
    ledger.launched("spot-0", 1000.0)
    assert committed_usd(ledger, 1010.0) == 50.0
    assert committed_usd(ledger, 1040.0) == CLOUD_WIND_DOWN_S
    ledger.ended("spot-0", 1100.0)
    assert committed_usd(ledger, 1100.0) == 0.0


def test_a_machine_that_went_in_its_first_minute_commits_the_rest_of_it(ledger: Ledger) -> None:
    intend(ledger, "spot-0", "gcp")
    ledger.launched("spot-0", 1000.0)
    ledger.ended("spot-0", 1005.0)
    assert ledger.total_micro_usd(1005.0) == 5e6
    assert committed_usd(ledger, 1005.0) == 55.0
    assert ledger.total_micro_usd(1060.0) == 60e6
    assert committed_usd(ledger, 1060.0) == 0.0


def test_a_launch_that_failed_commits_nothing(ledger: Ledger) -> None:
    intend(ledger, "spot-0", "gcp")
    ledger.failed("spot-0", 1001.0, "no capacity")
    assert committed_usd(ledger, 1001.0) == 0.0


def test_processes_on_this_machine_commit_next_to_nothing(ledger: Ledger) -> None:
    intend(ledger, "spot-0", "local")
    ledger.launched("spot-0", 1000.0)
    assert committed_usd(ledger, 1010.0) == LOCAL_WIND_DOWN_S
    assert least_micro_usd("local", A_DOLLAR_A_SECOND, 0) == LOCAL_WIND_DOWN_S * 1e6
    assert least_micro_usd("gcp", A_DOLLAR_A_SECOND, 60) == 60e6


@pytest.mark.parametrize(("provider", "usd"), [("aws", 60), ("gcp", 60), ("local", 7)])
def test_a_short_life_costs_what_its_cloud_bills_at_least(ledger: Ledger, provider: str, usd: int) -> None:
    intend(ledger, "spot-0", provider)
    ledger.launched("spot-0", 1000.0)
    ledger.ended("spot-0", 1007.0)
    assert ledger.total_micro_usd(2000.0) == usd * 1_000_000
    [bill] = ledger.machines(2000.0)
    assert bill.cost_micro_usd == usd * 1_000_000
    assert bill.ended_at == 1007.0
    totals = [ledger.total_micro_usd(1000.0 + second) for second in range(0, 90, 3)]
    assert totals == sorted(totals)
    assert ledger.spending().total_micro_usd(2000.0) == ledger.total_micro_usd(2000.0)


def test_where_the_cloud_put_a_machine_decides_its_price_until_it_is_billed(ledger: Ledger) -> None:
    intend(ledger, "spot-0", "aws")
    ledger.placed("spot-0", "us-east-2b", A_DOLLAR_A_SECOND // 2)
    ledger.launched("spot-0", 1000.0)
    ledger.placed("spot-0", "us-east-2c", 1)
    [bill] = ledger.machines(1100.0)
    assert (bill.zone, bill.cost_micro_usd) == ("us-east-2b", 50_000_000)


def test_a_bought_head_is_counted_with_the_time_that_it_stays_after_its_run() -> None:
    head = HeadMachine("head-1", "aws", "z", "H100:8", A_DOLLAR_A_SECOND, "test", 1000.0, stays_s=900.0)
    assert stay_micro_usd(head) == 900_000_000


@pytest.mark.parametrize(("min_billed_s", "usd"), [(0, 7), (60, 60), (None, 60)])
def test_a_machine_of_skypilot_is_billed_what_its_own_offer_says(
    ledger: Ledger, min_billed_s: int | None, usd: int
) -> None:
    intend(ledger, "spot-0", "skypilot", min_billed_s)  # None: books of a version that did not record it
    ledger.launched("spot-0", 1000.0)
    ledger.ended("spot-0", 1007.0)
    assert ledger.total_micro_usd(2000.0) == usd * 1_000_000
    assert ledger.machines(2000.0)[0].min_billed_s == min_billed_s
