"""Books that no coordinator will close any more, and what a report bills then."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlboost_providers.base.provider import MachineStatus, MachineView
from rlboost_runtime.billing.books import close_books, report_of
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE

NOW = time.time()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    books = Ledger(folder.ledger)
    for machine in (RESERVED_MACHINE, "spot-0", "spot-1"):
        books.intend(
            MachineRecord(
                machine,
                pool="reserved" if machine == RESERVED_MACHINE else "spot",
                provider="local",
                zone="z",
                accelerator="cpu",
                price_micro_usd_per_hour=3_600_000_000,
                price_source="job file",
                intended_at=NOW - 100,
            )
        )
    books.launched(RESERVED_MACHINE, NOW - 100)
    books.close()
    return folder


def books_of(run: RunFolder) -> dict[str, tuple[str, int]]:
    books = Ledger(run.ledger, read_only=True)
    try:
        return {b.machine: (str(b.state), b.billed_ns // 10**9) for b in books.machines(NOW)}
    finally:
        books.close()


def test_a_launch_that_nobody_noted_is_billed_for_its_life(run: RunFolder) -> None:
    views = [MachineView("spot-0", MachineStatus.GONE, NOW - 50, NOW - 20)]
    for _ in range(2):
        close_books(run, views, "ended")
    assert books_of(run) == {
        RESERVED_MACHINE: ("gone", 100),
        "spot-0": ("gone", 30),
        "spot-1": ("gone", 0),
    }


def test_what_is_there_or_may_be_stays_open(run: RunFolder) -> None:
    close_books(run, [MachineView("spot-0", MachineStatus.RUNNING, NOW - 50, None)], "ended")
    assert books_of(run)["spot-0"] == ("running", 50)
    assert books_of(run)["spot-1"][0] == "gone"


def test_a_cloud_that_says_nothing_closes_the_reserved_machine_only(run: RunFolder) -> None:
    close_books(run, None, "ended")
    assert {machine: state for machine, (state, _) in books_of(run).items()} == {
        RESERVED_MACHINE: "gone",
        "spot-0": "intended",
        "spot-1": "intended",
    }


def test_a_report_bills_no_later_than_the_end(run: RunFolder) -> None:
    write_json(run.outcome, {"state": "failed"})
    os.utime(run.outcome, (NOW - 40, NOW - 40))
    assert report_of(run).total_usd == pytest.approx(60.0, abs=0.01)
    books = Ledger(run.ledger)
    books.launched("spot-0", NOW - 50)
    books.ended("spot-0", NOW - 30)  # it outlived the run
    books.ended(RESERVED_MACHINE, NOW - 40)
    books.close()
    assert report_of(run).total_usd == pytest.approx(80.0, abs=0.01)
