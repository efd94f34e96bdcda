"""What a simulated trainer does of a response before its group is complete."""

from dataclasses import replace
from typing import Any

import pytest

from rlboost_runtime.sim import Preset, SimResult, Switches, presets, simulate
from rlboost_runtime.traces import Trace, TraceEvent


def preset(**workload: Any) -> Preset:
    """The paper's 14B with a fourth of a step."""
    paper = presets()["paper-14b"]
    return replace(paper, workload=replace(paper.workload, prompts=32, **workload))


def run(of: Preset, policy: str = "rlboost", *, early: bool = True) -> SimResult:
    market = Trace("stays", "", tuple(TraceEvent(0.0, f"n{i}", "add") for i in range(6)), 7_200.0)
    return simulate(of, market, policy, seed=0, hours=1.0, switches=Switches(early_passes=early))


def train_s(result: SimResult) -> float:
    return sum(row.train_s for row in result.rows[:5])


def test_waiting_for_groups_is_put_to_use() -> None:
    of = presets()["paper-14b"]
    early, late = run(of), run(of, early=False)
    assert early.tokens_per_s > 1.03 * late.tokens_per_s
    more_s = train_s(early) - train_s(late)
    assert 0 <= more_s <= 0.1 * train_s(late), "the same passes, in more micro-batches"


def test_nothing_is_early_where_all_passes_need_groups() -> None:
    of = preset()
    of = replace(of, assumptions=replace(of.assumptions, early_passes=0.0))
    assert run(of).commands_digest == run(of, early=False).commands_digest


def test_nothing_is_early_where_updates_are_in_flight() -> None:
    of = preset(max_staleness=1, in_flight_updates=True)
    assert run(of).commands_digest == run(of, early=False).commands_digest


@pytest.mark.parametrize("policy", ["paper", "on_demand", "recompute"])
def test_the_papers_trainer_does_nothing_early(policy: str) -> None:
    of = preset()
    assert run(of, policy).commands_digest == run(of, policy, early=False).commands_digest
