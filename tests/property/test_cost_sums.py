"""Whatever happened to machines, steps and waste: the report's parts add up, in JSON, in CSV and on paper."""

from __future__ import annotations

import csv
import io
import json
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost_cli.views.cost import COLUMNS, WASTE, WIDTH, cost_csv, cost_lines
from rlboost_runtime.billing.accounts import WasteKind, to_ns
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.report import cost_report
from rlboost_runtime.job import Budget
from tests.fakes.books import bill_egress

pytestmark = pytest.mark.property

T0 = 1_800_000_000.0
SPAN_S = 5000.0

seconds = st.floats(0, SPAN_S, allow_nan=False)
machines = st.lists(
    st.tuples(
        st.sampled_from(["reserved", "spot"]),
        st.integers(0, 10**9),  # micro-dollars per hour
        st.integers(0, 10**6),  # of its storage
        seconds,  # launch
        st.none() | seconds,  # lifetime
        st.none() | seconds,  # a second launch, so long after the end
        st.dictionaries(st.sampled_from(list(WasteKind)), seconds),
        st.booleans(),  # the launch failed
        st.lists(st.tuples(seconds, st.integers(0, 10**9)), max_size=4),  # other prices, so long after launch
        st.sampled_from(["local", "aws"]),  # without and with a least time that is billed
    ),
    max_size=8,
)
steps = st.lists(
    st.tuples(seconds, seconds, st.integers(0, 10**7), st.none() | st.floats(-5, 5)), max_size=30
)
usage = st.lists(st.tuples(st.integers(0, 10**8), seconds), max_size=4)
budgets = st.none() | st.integers(1, 10**6).map(lambda cents: Budget(max_usd=cents / 100))


def fill(ledger: Ledger, machines: Any, steps: Any, usage: Any) -> None:
    for number, machine in enumerate(machines):
        pool, price, storage, start, life, pause, wasted, fails, changes, cloud = machine
        name = f"{pool}-{number}"
        ledger.intend(MachineRecord(
            name, pool=pool, provider=cloud, zone="here", accelerator="cpu",
            price_micro_usd_per_hour=price, price_source="test", intended_at=T0 + start,
            storage_micro_usd_per_hour=storage,
        ))  # fmt: skip
        if fails:
            ledger.failed(name, T0 + start, "no capacity")
            continue
        ledger.launched(name, T0 + start)
        for after, other in changes:  # in any order: a clock may be set back
            ledger.repriced(name, other, T0 + start + after)
        if life is not None:
            ledger.ended(name, T0 + start + life)
            if pause is not None:
                ledger.launched(name, T0 + start + life + pause)
        ledger.add_wastes({(kind, name): s for kind, s in wasted.items()})
    for number, (start, length, tokens, reward) in enumerate(steps):  # in any order: trained again
        ledger.record_step(
            number, started_at=T0 + start, ended_at=T0 + start + length, tokens=tokens, reward_mean=reward,
            metrics={},
        )  # fmt: skip
    for amount, at in usage:
        bill_egress(ledger, amount, T0 + at)


def micro(usd: float | str) -> int:
    return round(float(usd) * 1_000_000)


def total_of(amounts: Any) -> int:
    return sum(micro(amount) for amount in amounts)


@settings(max_examples=25, deadline=None)
@given(machines, steps, usage, seconds, budgets)
def test_all_parts_add_up_to_the_micro_dollar(
    machines: Any, steps: Any, usage: Any, now: float, budget: Budget | None
) -> None:
    with TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        fill(ledger, machines, steps, usage)
        typed = cost_report(ledger, T0 + now, "a-run", budget)
        report = json.loads(json.dumps(msgspec.to_builtins(typed), allow_nan=False))
        ledger.close()
    check_sums(report)
    check_csv(report, list(csv.DictReader(io.StringIO(cost_csv(typed)))))
    assert max(map(len, cost_lines(typed)), default=0) <= WIDTH


@settings(max_examples=40, deadline=None)
@given(machines, st.lists(seconds, max_size=6))
def test_a_machine_costs_its_time_at_the_price_of_each_moment_and_never_less_later(
    machines: Any, moments: list[float]
) -> None:
    with TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        fill(ledger, machines, [], [])
        late = T0 + 10 * SPAN_S
        costs = {bill.machine: bill.cost_micro_usd for bill in ledger.machines(late)}
        totals = [ledger.total_micro_usd(T0 + at) for at in sorted(moments)]
        assert totals == ledger.spending().totals_micro_usd([T0 + at for at in sorted(moments)])
        ledger.close()
    assert totals == sorted(totals)
    for number, machine in enumerate(machines):
        assert costs[f"{machine[0]}-{number}"] == exact_cost(machine, to_ns(late))


def exact_cost(machine: Any, until: int) -> int:
    """Return what the machine costs, added up piece by piece."""
    _, price, _, start, life, pause, _, fails, changes, cloud = machine
    if fails:
        return 0
    least_ns = 60 * 10**9 if cloud == "aws" else 0
    begin = to_ns(T0 + start)
    end = None if life is None else max(begin, to_ns(T0 + start + life))
    lives = [(begin, until if end is None else max(end, begin + least_ns))]
    if end is not None and pause is not None and to_ns(T0 + start + life + pause) > end:
        lives.append((to_ns(T0 + start + life + pause), until))
    pieces, since = [], 0
    for after, other in changes:
        at = max(since, to_ns(T0 + start + after))
        if other != price:
            pieces.append((since, at, price))
            since, price = at, other
    pieces.append((since, until, price))
    spent = sum(
        Fraction(max(0, min(b, to) - max(a, of)) * paid, 3_600 * 10**9)
        for a, b in lives
        for of, to, paid in pieces
    )
    return int(spent + Fraction(1, 2))


def check_sums(report: Any) -> None:
    total, other = micro(report["total_usd"]), total_of(report["other_usd"].values())
    assert total == total_of(m["cost_usd"] for m in report["machines"]) + other
    assert total == total_of(report["compute_usd"].values()) + other
    wasted = total_of(report["wasted_usd"].values())
    assert total == micro(report["useful_usd"]) + wasted + other
    outside = total_of(report["outside_steps_usd"].values())
    assert total == total_of(s["usd"] for s in report["steps"]) + outside
    for machine in report["machines"]:
        parts = [machine["useful_usd"], *machine["wasted_usd"].values()]
        assert min(parts) >= 0
        assert total_of(parts) == micro(machine["cost_usd"])
    for kind, amount in report["wasted_usd"].items():
        assert micro(amount) == total_of(m["wasted_usd"][kind] for m in report["machines"])
    assert all(s["usd"] >= 0 for s in report["steps"])


def check_csv(report: Any, rows: list[dict[str, str]]) -> None:
    assert all(tuple(row) == COLUMNS for row in rows)
    by_kind = {
        kind: [r for r in rows if r["kind"] == kind] for kind in ("machine", "other", "step", "outside")
    }
    assert sum(map(len, by_kind.values())) == len(rows)
    total = micro(report["total_usd"])
    assert total == total_of(r["usd"] for r in by_kind["machine"] + by_kind["other"])
    assert total == total_of(r["usd"] for r in by_kind["step"] + by_kind["outside"])
    for row in by_kind["machine"]:
        assert micro(row["usd"]) == total_of(row[f"{part}_usd"] for part in ("useful", *WASTE))
    assert [int(row["id"]) for row in by_kind["step"]] == [s["step"] + 1 for s in report["steps"]]
    assert sum(int(row["tokens"]) for row in by_kind["step"]) == report["tokens_trained"]
