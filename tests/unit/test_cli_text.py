from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer

from rlboost_cli.commands.launch import _ask
from rlboost_cli.planning.plan import LaunchPlan, PlanLine, describe_plan, launch_plan
from rlboost_cli.terminal.text import table, tilde
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job


def test_tables_align_numbers_to_the_right() -> None:
    assert table(("name", "count"), [("a", 5), ("long", 1000), ("none", None)]).splitlines() == [
        "name  count",
        "a         5",
        "long   1000",
        "none      -",
    ]


def test_paths_below_home_are_written_as_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tilde(tmp_path / ".rlboost" / "runs" / "demo") == "~/.rlboost/runs/demo"
    assert tilde(Path("/srv/runs")) == "/srv/runs"


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
    assert any("costs nothing" in line for line in describe_plan(plan))


def test_money_is_never_spent_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan("r", 1, (PlanLine("spot", "aws/us-east-2", 2, 1),), 2, 3.0, None)
    _ask(plan, yes=True)
    monkeypatch.setattr("rlboost_cli.terminal.output.is_terminal", lambda: False)
    with pytest.raises(ConfigError, match="costs money"):
        _ask(plan, yes=False)
    monkeypatch.setattr("rlboost_cli.terminal.output.is_terminal", lambda: True)
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
