from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rlboost_cli.terminal.text import usd_parts
from rlboost_cli.views.ending import ended_lines, next_lines, warning_lines
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.report import BudgetState, CostReport, Counterfactual, MachineCost, OutsideSteps
from rlboost_runtime.protocol.status import Status, read_status

STATUS = read_status(
    {
        "step": 10,
        "steps": 10,
        "started_at": 1000.0,
        "at": 1300.0,
        "reward_history": [0.1] * 5 + [0.4] * 5,
        "preemptions": {"noticed": 3, "silent": 0, "reset": 15},
        "responses": {"migrated": 34},
        "tokens": {"lost_estimate": 15, "generated": 30_000},
    }
)
ON_DEMAND = Counterfactual(
    usd_per_million_tokens=232.14,
    saving_fraction=0.267,
    basis="computed, not run: the tokens trained at the rate measured",
)


def report(**changes: Any) -> CostReport:
    made = CostReport(
        run="r", as_of=0.0, total_usd=1.5549, rate_usd_per_hour=0.0, budget=BudgetState(),
        compute_usd={"reserved": 0.94, "spot": 0.6149}, other_usd={}, useful_usd=1.5549, wasted_usd={},
        tokens_trained=0, usd_per_million_tokens=170.23, counterfactual=ON_DEMAND, steps=[],
        outside_steps_usd=OutsideSteps(), machines=[], price_sources=[], rewards={}, notes=[],
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def test_the_end_is_a_summary_on_eighty_columns() -> None:
    lines = ended_lines("quickstart", "done", STATUS, report())
    assert lines == [
        "quickstart is done: 10 of 10 steps in 5 min",
        "reward   0.100 -> 0.400, x4.00 (first and last 5 steps)",
        "kept     18 preemptions survived, 3 with notice",
        "         34 responses migrated, about 15 tokens lost of 30,000 (0.05%)",
        "cost     $1.55 (reserved $0.94, spot $0.61)",
        "         $170.23 per million tokens trained, start-up and end included",
        "         $170.16 in steps, $232.14 on demand (computed): 27% saved",
    ]
    assert all(len(line) < 80 for line in lines)


def test_what_is_not_known_is_not_said() -> None:
    unknown = report(usd_per_million_tokens=None, counterfactual=Counterfactual(basis="not known: no step"))
    assert ended_lines("r", "failed", Status(run="r"), unknown) == [
        "r failed",
        "cost     $1.55 (reserved $0.94, spot $0.61)",
    ]
    dearer = report(counterfactual=msgspec.structs.replace(ON_DEMAND, saving_fraction=-0.5))
    assert ended_lines("r", "done", STATUS, dearer)[-1].endswith("50% more")


def test_the_time_of_a_resumed_run_says_what_is_in_it() -> None:
    machine = MachineCost(
        id="head", pool="reserved", provider="local", zone="here", accelerator="cpu", state="ended",
        started_at=0.0, ended_at=1.0, num_lives=2, billed_s=1.0, price_usd_per_hour=1.0, price_source="job",
        cost_usd=1.0, useful_usd=1.0, wasted_usd={},
    )  # fmt: skip
    first = ended_lines("r", "done", STATUS, report(machines=[machine]))[0]
    assert first == "r is done: 10 of 10 steps in 5 min, with the time before it was resumed"


def test_the_cost_comes_with_its_reason() -> None:
    wasteful = report(useful_usd=0.6, wasted_usd={"boot": 0.3, "idle": 0.1})
    assert "         60% useful; most of the rest is boot (30%)" in ended_lines("r", "done", STATUS, wasteful)


def test_a_run_without_gpus_points_to_the_simulator() -> None:
    last = next_lines("r", "done", "~/model", 3, is_local=True)[-1]
    assert last == "         rlboost simulate --preset paper-8b  larger GPUs, simulated"


def test_what_to_type_next_depends_on_the_end() -> None:
    assert next_lines("r", "done", "~/model", 3) == [
        "model    ~/model",
        "next     rlboost metrics r    curves, and what they mean",
        "         rlboost samples r    what the model wrote",
        "         rlboost cost r       cost by step and machine",
        "         rlboost dashboard r  all of it on a page",
    ]
    assert next_lines("r", "failed", "~/model", 3)[-1].endswith(
        "--resume  continues from the last checkpoint"
    )
    assert next_lines("r", "failed", "~/model", 0)[-1].endswith("--resume  starts over")
    served = next_lines("r", "stopped", "~/model", 0, only_serves=True)
    assert served[-1] == "         rlboost serve r --resume  serves it again"


def test_a_machine_that_may_still_cost_money_is_named_with_its_price_and_what_to_type() -> None:
    machine = MachineRecord("spot-1", "aws", "us-east-1a", "H100:8", 98_320_000, "list", intended_at=0.0)
    assert warning_lines("mine", "no usable AWS credentials", [machine]) == [
        "warning: no usable AWS credentials",
        "left     spot-1  H100:8 in aws us-east-1a, $98.32 per hour",
        "hint: rlboost down mine asks the cloud again; rlboost gc does so for all runs",
    ]
    assert warning_lines("mine", "no usable AWS credentials", []) == []


def test_the_amounts_shown_add_up_to_the_total_shown() -> None:
    split = report(
        total_usd=0.2449, compute_usd={"reserved": 0.2352, "spot": 0.0051}, other_usd={"egress": 0.0046}
    )
    assert "cost     $0.24 (reserved $0.24, spot $0.00, egress $0.00)" in ended_lines(
        "r", "done", STATUS, split
    )


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_rounded_parts_add_up(micro_usd: list[int], places: int) -> None:
    total, unit = sum(micro_usd) / 1e6, 10**places
    shown = [round(float(each[1:].replace(",", "")) * unit)
             for each in usd_parts(total, [each / 1e6 for each in micro_usd], places)]  # fmt: skip
    assert sum(shown) == round(float(f"{total:.{places}f}") * unit)
    assert all(
        abs(cents - each / 1e6 * unit) <= 1 + 1e-6 for cents, each in zip(shown, micro_usd, strict=True)
    )
