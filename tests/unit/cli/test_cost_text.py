"""The cost report on paper and as CSV."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlboost_cli.views.cost import MAX_STEP_LINES, cost_csv, cost_lines
from rlboost_runtime.billing.accounts import WasteKind
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.report import CostReport, Counterfactual, cost_report
from rlboost_runtime.job import Budget
from tests.fakes.books import bill_egress

T0 = 1_800_000_000.0


def report(tmp_path: Path, num_steps: int = 40, num_spot: int = 300, **budget: Any) -> CostReport:
    """A long run on a reserved machine and many spot ones, at a dollar per second from the first one on."""
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def buy(name: str, pool: str, zone: str, start: float, end: float | None) -> None:
        ledger.intend(MachineRecord(
            name, pool=pool, provider="elsewhere", zone=zone, accelerator="H100:8",
            price_micro_usd_per_hour=3_600_000_000, price_source="test", intended_at=T0 + start,
        ))  # fmt: skip
        ledger.launched(name, T0 + start)
        if end is not None:
            ledger.ended(name, T0 + end)

    buy("reserved-0", "reserved", "us-east-2a", 0, None)
    for number in range(num_spot):
        buy(f"spot-{number}", "spot", f"us-east-2{'bc'[number % 2]}", 10 + number, 20 + number)
    if num_spot:
        ledger.add_wastes({(WasteKind.BOOT, "spot-0"): 4.0})
    for step in range(num_steps):
        ledger.record_step(
            step, started_at=T0 + 20 + 10 * step, ended_at=T0 + 30 + 10 * step, tokens=100_000,
            reward_mean=step / 100, metrics={},
        )  # fmt: skip
    bill_egress(ledger, 1_500_000, T0 + 50)
    made = cost_report(ledger, T0 + 1000, "a-run", Budget(**budget))
    ledger.close()
    return made


def rows_of(lines: list[str], first_word: str) -> list[list[str]]:
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(first_word))
    end = next((i for i in range(at, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[at:end]]


def test_the_report_says_what_was_spent_on_what(tmp_path: Path) -> None:
    lines = cost_lines(report(tmp_path, max_usd=5000.0, max_usd_per_hour=4000.0))
    assert lines[0] == "a-run     $4,001.50 so far, $3,600.00 per hour now"
    budget = "budget    $5,000.00, $998.50 left: 17 min at this rate; at most $4,000.00 per hour"
    assert f"{lines[1]} {lines[2].strip()}" == budget
    assert "tokens    4,000,000 trained, $1,000.38 per million, start-up included" in lines
    assert ["boot", "$0.00", "$4.00", "$4.00"] in rows_of(lines, "reserved  ")
    assert ["total", "$1,000.00", "$3,000.00", "$4,001.50"] in rows_of(lines, "reserved  ")
    assert ["egress", "-", "-", "$1.50"] in rows_of(lines, "reserved  ")


def test_many_steps_and_machines_are_summed_in_few_lines(tmp_path: Path) -> None:
    made = report(tmp_path)
    steps = rows_of(cost_lines(made), "step ")[1:]
    assert len(steps) <= MAX_STEP_LINES + 2
    assert (steps[0][0], steps[1][0], steps[-1][0]) == ("before", "1-4", "after")
    assert steps[1][2] == "400,000"
    printed = sum(float(row[3].strip("$").replace(",", "")) for row in steps)
    assert printed == pytest.approx(made.total_usd, abs=0.01 * len(steps))
    offers = rows_of(cost_lines(made), "pool ")[1:]
    assert [(row[1], row[3]) for row in offers] == [
        ("us-east-2a", "1"), ("us-east-2b", "150"), ("us-east-2c", "150")
    ]  # fmt: skip


def test_few_steps_have_a_line_each(tmp_path: Path) -> None:
    steps = rows_of(cost_lines(report(tmp_path, num_steps=3, num_spot=0)), "step ")[1:]
    assert [row[0] for row in steps] == ["before", "1", "2", "3", "after"]


def test_a_spent_budget_is_said_to_be_exceeded(tmp_path: Path) -> None:
    text = "\n".join(cost_lines(report(tmp_path, num_spot=0, max_usd=1000.0)))
    assert "budget    $1,000.00, exceeded by $1.50" in text


def test_machines_that_outlive_their_run_are_named(tmp_path: Path) -> None:
    made = report(tmp_path, num_spot=1)
    made.state = "failed"
    assert "machines are left" not in "\n".join(cost_lines(made))
    made.machines[1].state = "running"
    assert "failed, but machines are left" in " ".join(cost_lines(made))
    assert "rlboost down a-run" in " ".join(cost_lines(made))


def test_csv_times_are_utc_and_come_back(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(cost_csv(report(tmp_path, num_spot=1)))))
    machine = next(row for row in rows if row["id"] == "spot-0")
    assert datetime.fromisoformat(machine["started_at"]).timestamp() == T0 + 10
    assert datetime.fromisoformat(machine["ended_at"]).timestamp() == T0 + 20
    assert (machine["usd"], machine["boot_usd"], machine["useful_usd"]) == (
        "10.000000",
        "4.000000",
        "6.000000",
    )
    assert next(row for row in rows if row["id"] == "reserved-0")["ended_at"] == ""
    step = next(row for row in rows if row["kind"] == "step")
    assert (step["id"], step["tokens"], step["usd"]) == ("1", "100000", "10.000000")


def test_on_demand_is_compared_with_what_the_same_steps_cost(tmp_path: Path) -> None:
    """Not with the whole run, which has start-up and end besides."""
    figures = Counterfactual(usd_per_million_tokens=40.0, saving_fraction=0.25, basis="computed, not run")
    made = msgspec.structs.replace(report(tmp_path, num_steps=3, num_spot=2), counterfactual=figures)
    text = "\n".join(cost_lines(made))
    assert "$40.00 per million tokens; these steps cost $30.00: 25.0% saved" in text
