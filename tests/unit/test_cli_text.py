from __future__ import annotations

import io
from typing import Any

import pytest
import typer

from rlboost_cli.attach import NewLines
from rlboost_cli.commands.launch import _ask
from rlboost_cli.plan import LaunchPlan, PlanLine, describe_plan, launch_plan
from rlboost_cli.run_status import RunStatus
from rlboost_cli.text import sparkline, status_lines, summary_lines, table
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job


def live(**data: Any) -> RunStatus:
    return RunStatus(data, is_live=True, has_ended=False, age_s=0.0)


def silent(**data: Any) -> RunStatus:
    return RunStatus(data, is_live=False, has_ended=False, age_s=9.0, problem="the coordinator is silent")


def test_tables_align_numbers_to_the_right() -> None:
    assert table(("name", "count"), [("a", 5), ("long", 1000), ("none", None)]).splitlines() == [
        "name  count",
        "a         5",
        "long   1000",
        "none      -",
    ]


def test_a_sparkline_spans_its_own_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, None]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(100)))) == 40


def test_a_status_of_nothing_but_a_name_can_be_shown() -> None:
    assert status_lines({"run": "r", "state": "provisioning"})[0] == "r: provisioning"


def test_a_full_status_shows_instances_money_and_trouble() -> None:
    text = "\n".join(
        status_lines(
            {
                "run": "r",
                "state": "rollout",
                "phase": "rollout, 3 of 8 responses finished",
                "step": 4,
                "steps": 10,
                "reward_history": [0.1, 0.9],
                "preemptions": {"noticed": 1, "silent": 2},
                "instances": [{"id": "spot-1/0", "pool": "spot", "state": "ready", "tokens_per_s": 1234.4}],
                "cost": {"spent_usd": 1.5, "rate_usd_per_hour": 2, "budget_usd": 10},
                "journal_problem": "disk full",
                "events": [{"at": 0, "kind": "gone", "text": "spot-0 is gone"}],
            }
        )
    )
    for piece in ("3 of 8 responses", "4/10", "3 preemptions", "spot-1/0", "1,234", "$1.5000 of $10.00"):
        assert piece in text
    for piece in ("disk full", "spot-0 is gone"):
        assert piece in text


def test_each_step_and_event_is_told_once() -> None:
    new = NewLines()
    event = {"at": 5.0, "kind": "gone", "text": "spot-0 is gone"}
    assert new.of(live(step=0, steps=5)) == []
    first = new.of(live(step=1, steps=5, reward_history=[0.25], events=[event], tokens_per_s=10))
    assert [line[-14:] for line in first[:1]] == ["spot-0 is gone"]
    assert first[1].startswith("step 1/5  reward 0.250  10 tokens/s")
    assert new.of(live(step=1, steps=5, reward_history=[0.25], events=[event])) == []
    later = new.of(live(step=3, steps=5, reward_history=[0.25, 0.5, 0.75]))
    assert later[0] == "step 2/5  reward 0.500"
    assert later[1].startswith("step 3/5  reward 0.750")
    assert len(later) == 2


def test_a_late_watcher_is_not_told_the_whole_past() -> None:
    lines = NewLines().of(live(step=100, steps=200, reward_history=[0.5] * 100))
    assert len(lines) == 1
    assert lines[0].startswith("step 100/200")


def test_silence_and_its_end_are_told_once() -> None:
    new = NewLines()
    assert new.of(silent()) == ["the coordinator is silent"]
    assert new.of(silent()) == []
    assert new.of(live()) == ["the coordinator answers again"]


def test_the_summary_survives_null_values() -> None:
    nothing = dict.fromkeys(
        ("phase", "reward_mean", "reward_history", "responses", "tokens", "cost", "tokens_per_s")
    )
    assert len(summary_lines({"run": "r", "state": "done", **nothing})) == 5


def test_a_local_plan_costs_nothing_and_says_so() -> None:
    job = Job.model_validate(
        {
            "name": "demo",
            "model": {"init": "tiny"},
            "data": {"reasoning_gym": ["x"]},
            "trainer": {"price_usd_per_hour": 10.0},
            "rollout": {
                "spot": {
                    "max_instances": 3,
                    "any_of": [
                        {"infra": "local", "price_usd_per_hour": 0.1},
                        {"infra": "local", "price_usd_per_hour": 0.3},
                    ],
                }
            },
        }
    )
    plan = launch_plan("demo", job)
    assert not plan.is_charged
    assert plan.ceiling_micro_usd_per_hour == 10_900_000
    assert "costs nothing" in describe_plan(plan)[-1]


def test_money_is_never_spent_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan("r", 1, (PlanLine("spot", "aws/us-east-2", 2, 1),), 2, 3.0, None)
    _ask(plan, yes=True)
    monkeypatch.setattr("rlboost_cli.output.is_terminal", lambda: False)
    with pytest.raises(ConfigError, match="costs money"):
        _ask(plan, yes=False)
    monkeypatch.setattr("rlboost_cli.output.is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(typer.Exit):
        _ask(plan, yes=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    _ask(plan, yes=False)


def test_a_cloud_plan_is_asked_about_unless_it_is_free() -> None:
    def plan(price: int) -> LaunchPlan:
        lines = (PlanLine("reserved", "local", 1, 5), PlanLine("spot", "aws/us-east-2", 2, price))
        return LaunchPlan("r", 1, lines, 2, 3.0, None)

    assert plan(1).is_charged
    assert not plan(0).is_charged
    assert any("$3.00" in line for line in describe_plan(plan(1)))
    assert not any("costs nothing" in line for line in describe_plan(plan(1)))
