from __future__ import annotations

from typing import Any

from rlboost_cli.views.ending import ended_lines, next_lines

STATUS: dict[str, Any] = {
    "step": 10,
    "steps": 10,
    "started_at": 1000.0,
    "at": 1300.0,
    "reward_history": [0.1] * 5 + [0.4] * 5,
    "preemptions": {"noticed": 3, "silent": 0, "reset": 15},
    "responses": {"migrated": 34},
    "tokens": {"lost_estimate": 15},
}
REPORT: dict[str, Any] = {
    "total_usd": 1.5549,
    "compute_usd": {"reserved": 0.94, "spot": 0.6149},
    "usd_per_million_tokens": 170.23,
    "counterfactual": {
        "usd_per_million_tokens": 232.14,
        "saving_fraction": 0.267,
        "basis": "computed, not run: the tokens trained at the rate measured",
    },
}


def test_the_end_is_a_summary_on_eighty_columns() -> None:
    lines = ended_lines("quickstart", "done", STATUS, REPORT)
    assert lines == [
        "quickstart is done: 10 of 10 steps in 5 min",
        "reward   0.100 -> 0.400 (first and last 5 steps)",
        "spot     18 preemptions survived, 3 with notice",
        "         34 responses migrated, about 15 tokens lost",
        "cost     $1.55 (reserved $0.94, spot $0.61)",
        "         $170.23 per million tokens trained",
        "         on demand only (computed): $232.14 per million, 27% saved",
    ]
    assert all(len(line) < 80 for line in lines)


def test_what_is_not_known_is_not_said() -> None:
    unknown = {"usd_per_million_tokens": None, "saving_fraction": None, "basis": "not known: no step"}
    report = {**REPORT, "usd_per_million_tokens": None, "counterfactual": unknown}
    assert ended_lines("r", "failed", {"run": "r"}, report) == [
        "r failed",
        "cost     $1.55 (reserved $0.94, spot $0.61)",
    ]
    dearer = {**REPORT, "counterfactual": {**REPORT["counterfactual"], "saving_fraction": -0.5}}
    assert ended_lines("r", "done", STATUS, dearer)[-1].endswith("spot cost 50% more")


def test_what_to_type_next_depends_on_the_end() -> None:
    assert next_lines("r", "done", "~/model", 3) == [
        "model    ~/model",
        "next     rlboost cost r  every step, every machine",
        "         rlboost logs r  what its processes said",
    ]
    assert next_lines("r", "failed", "~/model", 3)[-1].endswith("--resume  goes on from the last checkpoint")
    assert next_lines("r", "failed", "~/model", 0)[-1].endswith("--resume  begins again")
