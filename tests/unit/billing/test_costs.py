"""Which moment a run's cost report is of: while it runs, once it has ended, after it was resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE

NOW = time.time()
DOLLAR_PER_S = 3_600_000_000


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir()
    write_json(folder.job_json, {"name": "demo", "budget": {"max_usd": 500.0}, "of_a_later_version": 1})
    return folder


@pytest.fixture
def books(run: RunFolder) -> Iterator[Ledger]:
    ledger = Ledger(run.ledger)
    for machine, pool in ((RESERVED_MACHINE, "reserved"), ("spot-0", "spot")):
        ledger.intend(MachineRecord(
            machine, pool=pool, provider="local", zone="here", accelerator="cpu",
            price_micro_usd_per_hour=DOLLAR_PER_S, price_source="test", intended_at=NOW - 100,
        ))  # fmt: skip
    ledger.launched(RESERVED_MACHINE, NOW - 100)
    yield ledger
    ledger.close()


def end(run: RunFolder, state: str, at: float) -> None:
    write_json(run.outcome, {"state": state})
    os.utime(run.outcome, (at, at))


def total(run: RunFolder) -> float:
    found = report_of(run).total_usd
    assert isinstance(found, float)
    return found


def test_a_run_that_never_started_has_cost_nothing(run: RunFolder) -> None:
    report = report_of(run)
    assert (report.total_usd, report.state, report.machines) == (0.0, "open", [])
    assert not run.ledger.exists()


def test_a_running_run_costs_more_every_moment(run: RunFolder, books: Ledger) -> None:
    first = total(run)
    assert first >= 100
    time.sleep(0.01)
    assert total(run) > first
    left = report_of(run).budget.left_usd
    assert left is not None
    assert left < 400


def test_a_run_that_failed_costs_what_it_had_when_it_ended(run: RunFolder, books: Ledger) -> None:
    end(run, "failed", NOW - 40)
    assert total(run) == pytest.approx(60, abs=0.001)
    assert report_of(run).state == "failed"


def test_a_spot_machine_that_outlives_its_run_costs_on(run: RunFolder, books: Ledger) -> None:
    books.launched("spot-0", NOW - 60)
    books.ended(RESERVED_MACHINE, NOW - 40)
    end(run, "failed", NOW - 40)
    assert total(run) >= 60 + 60
    books.ended("spot-0", NOW - 10)
    assert total(run) == pytest.approx(60 + 50, abs=0.001)


def test_a_resumed_run_is_billed_for_both_its_lives_and_not_in_between(run: RunFolder, books: Ledger) -> None:
    books.ended(RESERVED_MACHINE, NOW - 80)
    end(run, "failed", NOW - 80)
    assert total(run) == pytest.approx(20, abs=0.001)
    run.outcome.unlink()
    books.launched(RESERVED_MACHINE, NOW - 10)  # rlboost launch --resume
    report = report_of(run)
    assert 30 <= total(run) <= 30 + (time.time() - NOW)  # it runs, so it is billed to this moment
    assert report.machines[0].num_lives == 2
    assert any("resumed" in note for note in report.notes)
    books.ended(RESERVED_MACHINE, NOW)
    end(run, "done", NOW)
    assert total(run) == pytest.approx(30, abs=0.001)
