from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlboost_runtime.billing.accounts import WasteKind
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.report import cost_report as typed_report
from rlboost_runtime.job import Budget
from tests.fakes.books import bill_egress

T0 = 1_800_000_000.0
HOUR_OF_DOLLAR_SECONDS = 3_600_000_000
"""Micro-dollars per hour that make a dollar per second."""


@pytest.fixture
def ledger(tmp_path: Path):
    books = Ledger(tmp_path / "ledger.sqlite")
    yield books
    books.close()


def run_machine(books: Ledger, machine: str, pool: str, price: int, start: float, end: float | None) -> None:
    books.intend(
        MachineRecord(
            machine,
            pool=pool,
            provider="local",
            zone="here",
            accelerator="cpu",
            price_micro_usd_per_hour=price,
            price_source="job file",
            intended_at=T0 + start,
        )
    )
    books.launched(machine, T0 + start)
    if end is not None:
        books.ended(machine, T0 + end)


def add_step(books: Ledger, step: int, start: float, end: float, tokens: int, **metrics: float) -> None:
    books.record_step(
        step, started_at=T0 + start, ended_at=T0 + end, tokens=tokens, reward_mean=0.5, metrics=metrics
    )


def test_the_time_before_a_resumption_is_not_time_of_a_step(ledger: Ledger) -> None:
    run_machine(ledger, "reserved-0", "reserved", HOUR_OF_DOLLAR_SECONDS, 0, 12)
    add_step(ledger, 0, 0, 10, 100)
    ledger.launched("reserved-0", T0 + 112)  # rlboost launch --resume
    add_step(ledger, 1, 10, 120, 100)
    first, second = cost_report(ledger, T0 + 120, "r")["steps"]
    assert (first["seconds"], first["usd"]) == (10, 10)
    assert (second["seconds"], second["usd"]) == (10, 10)


def micro(usd: float) -> int:
    return round(usd * 1_000_000)


def cost_report(*arguments: Any) -> Any:
    """The report as the JSON that `rlboost cost --json` prints."""
    return msgspec.to_builtins(typed_report(*arguments))


def test_an_empty_ledger_has_a_complete_report(ledger: Ledger) -> None:
    report = cost_report(ledger, T0, "empty")
    assert report.keys() >= {
        "run",
        "total_usd",
        "compute_usd",
        "other_usd",
        "wasted_usd",
        "tokens_trained",
        "usd_per_million_tokens",
        "counterfactual",
        "steps",
        "machines",
    }
    assert report["compute_usd"] == {"reserved": 0, "spot": 0}
    assert report["other_usd"] == {"egress": 0, "storage": 0}
    assert report["wasted_usd"] == {"boot": 0, "idle": 0, "lost": 0, "redone": 0}
    assert report["usd_per_million_tokens"] is None
    assert report["counterfactual"]["saving_fraction"] is None


def test_parts_add_up_to_the_total_to_the_micro_dollar_also_after_json(ledger: Ledger) -> None:
    rng = random.Random(11)
    run_machine(ledger, "head", "reserved", 98_320_017, 0, None)
    for number in range(60):
        start = rng.random() * 3000
        run_machine(ledger, f"s{number}", "spot", rng.randrange(10**8), start, start + rng.random() * 900)
    for step in range(40):
        add_step(ledger, step, 20 + step * 80.123, 20 + (step + 1) * 80.123, rng.randrange(10**6))
    bill_egress(ledger, 123_457, T0 + 100)
    bill_egress(ledger, 11, T0 + 5000)
    report = json.loads(json.dumps(cost_report(ledger, T0 + 4000.5, "r")))
    total = micro(report["total_usd"])
    assert total == sum(micro(m["cost_usd"]) for m in report["machines"]) + 123_457
    assert total == sum(micro(usd) for usd in report["compute_usd"].values()) + 123_457
    outside = report["outside_steps_usd"]
    assert total == sum(micro(s["usd"]) for s in report["steps"]) + micro(sum(outside.values()))
    for value in [report["total_usd"], *(m["cost_usd"] for m in report["machines"])]:
        assert micro(value) / 1_000_000 == value


def test_steps_pay_for_their_own_time(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", HOUR_OF_DOLLAR_SECONDS, 0, 40)
    run_machine(ledger, "spot", "spot", HOUR_OF_DOLLAR_SECONDS, 15, 20)
    add_step(ledger, 0, 10, 20, 1000)
    add_step(ledger, 1, 21, 30, 1000)  # the second between the steps belongs to the later one
    ledger.add_wastes({(WasteKind.IDLE, "head"): 4.0})
    report = cost_report(ledger, T0 + 100, "r")
    assert (report["useful_usd"], report["wasted_usd"]["idle"]) == (41.0, 4.0)
    assert [s["usd"] for s in report["steps"]] == [15.0, 10.0]
    assert [s["seconds"] for s in report["steps"]] == [10.0, 9.0]
    assert report["outside_steps_usd"] == {"before": 10.0, "after": 10.0, "restarts": 0.0}
    assert report["usd_per_million_tokens"] == 45.0 / 2000 * 1e6


def test_a_step_trained_again_leaves_no_negative_cost_behind(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", HOUR_OF_DOLLAR_SECONDS, 0, 100)
    for step in range(3):
        add_step(ledger, step, 10 * step, 10 * step + 10, 100)
    add_step(ledger, 1, 40, 60, 100)  # the trainer went back to step 1; step 2 is not trained again yet
    report = cost_report(ledger, T0 + 100, "r")
    assert [s["usd"] for s in report["steps"]] == [10.0, 50.0, 0.0]
    assert report["outside_steps_usd"] == {"before": 0.0, "after": 40.0, "restarts": 0.0}


def test_a_resumption_is_no_part_of_the_step_after_it(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", HOUR_OF_DOLLAR_SECONDS, 0, 22)
    add_step(ledger, 0, 10, 20, 1000)
    run_machine(ledger, "head", "reserved", HOUR_OF_DOLLAR_SECONDS, 100, 150)  # boots for 30 seconds
    add_step(ledger, 1, 130, 140, 1000)
    add_step(ledger, 2, 141, 150, 1000)
    report = cost_report(ledger, T0 + 200, "r")
    assert [(s["restart_usd"], s["usd"]) for s in report["steps"]] == [(0.0, 10.0), (32.0, 10.0), (0.0, 10.0)]
    assert report["outside_steps_usd"] == {"before": 10.0, "after": 0.0, "restarts": 32.0}
    assert report["total_usd"] == 72.0


def test_what_is_left_of_the_budget_and_for_how_long(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", HOUR_OF_DOLLAR_SECONDS, 0, None)
    budget = cost_report(ledger, T0 + 60, "r", Budget(max_usd=100.5, max_usd_per_hour=4000.0))["budget"]
    assert budget == {
        "max_usd": 100.5, "left_usd": 40.5, "hours_left": round(40.5 / 3600, 4), "max_usd_per_hour": 4000.0,
    }  # fmt: skip
    assert cost_report(ledger, T0 + 120, "r", Budget(max_usd=100.5))["budget"]["left_usd"] == -19.5
    assert cost_report(ledger, T0 + 60, "r")["budget"]["left_usd"] is None


def test_waste_comes_from_the_books(ledger: Ledger) -> None:
    run_machine(ledger, "spot", "spot", HOUR_OF_DOLLAR_SECONDS, 0, 10)
    ledger.add_wastes({(WasteKind.BOOT, "spot"): 2.0})
    assert cost_report(ledger, T0 + 100, "r")["wasted_usd"]["boot"] == 2.0


def test_the_counterfactual_is_computed_from_what_was_measured(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", 4 * HOUR_OF_DOLLAR_SECONDS, 0, 100)
    run_machine(ledger, "spot", "spot", HOUR_OF_DOLLAR_SECONDS, 0, 100)
    measured = {"reserved_tokens": 200.0, "reserved_rollout_s": 2.0, "train_busy_s": 5.0}
    add_step(ledger, 0, 0, 10, 2000, **measured)  # alone: 2000 / 100 tokens/s + 5 s = 25 s at $4: $100
    add_step(ledger, 1, 10, 20, 9999)  # did not measure: takes no part on either side
    found = cost_report(ledger, T0 + 100, "r")["counterfactual"]
    assert found["usd_per_million_tokens"] == 100 / 2000 * 1e6
    assert found["saving_fraction"] == 0.5  # $50 were spent on step 0
    assert "computed, not run" in found["basis"]
    assert "1 measured steps" in found["basis"]


def test_a_run_without_spot_machines_paid_what_on_demand_costs(ledger: Ledger) -> None:
    """Rate and overheads are of other steps than those that the run had: computed, it would be too low."""
    run_machine(ledger, "head", "reserved", 4 * HOUR_OF_DOLLAR_SECONDS, 0, 100)
    measured = {"reserved_tokens": 200.0, "reserved_rollout_s": 1.0, "train_busy_s": 1.0}
    add_step(ledger, 0, 0, 10, 1000, **measured)
    add_step(ledger, 1, 10, 20, 1000)
    found = cost_report(ledger, T0 + 100, "r")["counterfactual"]
    assert found["usd_per_million_tokens"] == 80 / 2000 * 1e6
    assert found["saving_fraction"] is None
    assert "no spot machines" in found["basis"]


def test_an_unknown_counterfactual_says_why(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", 0, 0, 10)
    add_step(ledger, 0, 0, 10, 100, reserved_tokens=1, reserved_rollout_s=1, train_busy_s=1)
    found = cost_report(ledger, T0 + 100, "r")["counterfactual"]
    assert (found["usd_per_million_tokens"], found["saving_fraction"]) == (None, None)
    assert "trainer.price_usd_per_hour" in found["basis"]


def test_local_prices_are_said_to_be_the_job_files_own(ledger: Ledger) -> None:
    run_machine(ledger, "spot", "spot", 1, 0, 10)
    assert any("job file's own" in note for note in cost_report(ledger, T0, "r")["notes"])


def test_a_report_reads_the_machines_once_however_many_steps_there_are(ledger: Ledger) -> None:
    run_machine(ledger, "head", "reserved", HOUR_OF_DOLLAR_SECONDS, 0, None)
    for step in range(20):
        add_step(ledger, step, step, step + 1, 10)
    queries: list[str] = []
    ledger._db.set_trace_callback(queries.append)
    cost_report(ledger, T0 + 30, "r")
    assert sum("FROM machines" in query for query in queries) <= 2  # those that are open, and the others
