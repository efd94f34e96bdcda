from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer

from rlboost_cli.planning.agreement import agree
from rlboost_cli.planning.plan import LaunchPlan, PlanLine, describe_plan, launch_plan, plan_json
from rlboost_cli.terminal.text import table, tilde, wrapped
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
    assert plan.dearest_micro_usd_per_hour == 10_900_000
    assert any("nothing is billed" in line for line in describe_plan(plan))


def test_a_plan_says_where_a_head_goes_on_costing_until_somebody_ends_it() -> None:
    def head(after: dict[str, str] | None = None, **trainer: object) -> str:
        job = Job.model_validate(
            {
                "name": "demo",
                "model": {"init": "tiny"},
                "data": {"reasoning_gym": ["x"]},
                "trainer": {"accelerators": "H100:8", "via": "skypilot", **trainer},
                "output": "s3://bucket/runs",
                "after": after or {},
            }
        )
        return launch_plan("demo", job).head

    unended = {"infra": "lambda", "allow_unended": True}
    both = (
        "cannot end itself there, and costs until a `launch` that you watch is done or has failed, or until"
    )
    assert both in head(**unended)
    assert "costs until a `launch` that you watch has failed, or until" in head({"done": "stay"}, **unended)
    assert "costs until `rlboost down`" in head({"done": "stay", "failed": "stay"}, **unended)
    assert "shuts down once the results are at s3://bucket/runs" in head(infra="aws")


def test_money_is_never_spent_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LaunchPlan("r", 1, (PlanLine("spot", "aws/us-east-2", 2, 1),), 2, 3.0, None)
    agree(plan, "launch?", yes=True)
    monkeypatch.setattr("rlboost_cli.terminal.output.is_terminal", lambda: False)
    with pytest.raises(ConfigError, match="costs money"):
        agree(plan, "launch?", yes=False)
    monkeypatch.setattr("rlboost_cli.terminal.output.is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(typer.Exit):
        agree(plan, "launch?", yes=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    agree(plan, "launch?", yes=False)


def test_a_cloud_plan_is_asked_about_unless_it_is_free() -> None:
    def plan(price: int | None) -> LaunchPlan:
        lines = (PlanLine("reserved", "local", 1, 5), PlanLine("spot", "aws/us-east-2", 2, price))
        return LaunchPlan("r", 1, lines, 2, 3.0, None)

    assert plan(1).is_charged
    assert not plan(0).is_charged
    assert any("$3.00" in line for line in describe_plan(plan(1)))
    assert not any("nothing is billed" in line for line in describe_plan(plan(1)))

    unknown = plan(None)
    assert unknown.is_charged, "what nobody knows the price of is no gift"
    said = "\n".join(describe_plan(unknown))
    assert "2 x aws/us-east-2, price unknown" in said
    assert "$0.00 per hour with the full fleet, plus the unknown prices above" in said
    assert plan_json(unknown)["offers"][1]["price_usd_per_hour"] is None


def test_a_sentence_is_broken_between_words_and_its_name_stands_once() -> None:
    rows = [("short", "a"), ("a-long-name", "words of a sentence " * 4)]
    found = wrapped(rows, 45)
    assert [name for name, _ in found] == ["short", "a-long-name", "", ""]
    assert all(len(line) <= 45 for line in table(("name", "what"), found).splitlines())
    assert " ".join(line for _, line in found[1:]) == ("words of a sentence " * 4).strip()
