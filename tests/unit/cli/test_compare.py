"""`rlboost compare`: changed fields, and runs at the same step, token, second and dollar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.main import app
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.run.folder import RunFolder, write_json


def make_run(
    name: str,
    group: int,
    num_steps: int,
    step_s: float,
    usd_per_hour: int,
    tokens: int = 1000,
    seed: int = 0,
    reward: float = 0.0,
) -> None:
    """A run of a machine that began 100 s before the first step; the reward rises by 0.01 a step."""
    run = RunFolder.named(name)
    run.path.mkdir(parents=True)
    write_json(
        run.job_json,
        {"name": name, "algorithm": {"group_size": group, "steps": 40, "seed": seed}, "files": []},
    )
    write_json(run.outcome, {"state": "done"})
    ledger = Ledger(run.ledger)
    price = usd_per_hour * 1_000_000
    ledger.intend(MachineRecord("head", "local", "here", "cpu", price, "job", 900.0))
    ledger.launched("head", 900.0)
    lines = []
    for step in range(num_steps):
        began = 1000.0 + step * step_s
        ledger.record_step(
            step,
            started_at=began,
            ended_at=began + step_s,
            tokens=tokens,
            reward_mean=reward + step / 100,
            metrics={},
        )
        held_out = {"eval_reward_mean": 0.5 + step / 100} if step % 10 == 0 else {}
        lines.append(json.dumps({"step": step, "reward_mean": step / 100} | held_out) + "\n")
    run.metrics.write_text("".join(lines))
    ledger.ended("head", 1000.0 + num_steps * step_s)
    ledger.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    make_run("slow", 8, 30, 20.0, 36)
    make_run("fast", 16, 21, 10.0, 72, tokens=1500)
    return tmp_path


def rlboost(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def test_runs_are_compared_at_the_same_step_token_second_and_dollar(home: Path) -> None:
    found = json.loads(rlboost("compare", "slow", "fast", "--json").stdout)
    assert found["changed"] == {"algorithm.group_size": {"slow": 8, "fast": 16}}
    same = found["same"]
    assert {axis: same[axis]["at"] for axis in same} == {
        "steps": 21,
        "tokens": 30000,
        "seconds": 210.0,
        "usd": 6.2,
    }
    steps = same["steps"]["runs"]
    assert steps["slow"] == {
        "step": 21, "tokens": 21000, "seconds": 420.0, "usd": 5.2, "tokens_per_s": 50.0,
        "usd_per_million_tokens": pytest.approx(5.2e6 / 21000), "reward_mean": pytest.approx(0.155),
        "eval_reward_mean": 0.7,
    }  # fmt: skip
    assert (steps["fast"]["tokens"], steps["fast"]["seconds"], steps["fast"]["usd"]) == (31500, 210.0, 6.2)
    assert steps["fast"]["reward_mean"] == steps["slow"]["reward_mean"]
    assert [same["tokens"]["runs"][name]["step"] for name in ("slow", "fast")] == [30, 20]
    assert [same["seconds"]["runs"][name]["step"] for name in ("slow", "fast")] == [10, 21]
    assert [same["usd"]["runs"][name]["step"] for name in ("slow", "fast")] == [26, 21]
    for column in found["runs"]:
        cost = json.loads(rlboost("cost", column["run"], "--json").stdout)
        assert column["total_usd"] == cost["total_usd"]
        assert column["last"]["tokens"] == cost["tokens_trained"]
        assert column["curves"]["usd"][-1] == pytest.approx(cost["total_usd"])


def test_a_person_sees_what_was_changed_and_what_came_of_it(home: Path) -> None:
    lines = rlboost("compare", "slow", "fast").stdout.splitlines()
    assert lines[0].split() == ["job", "field", "slow", "fast"]
    assert lines[1].split() == ["algorithm.group_size", "8", "16"]
    (fast,) = [line.split() for line in lines if line.startswith("fast")]
    assert fast == ["fast", "done", "21", "0.155", "0.700", "31,500", "150", "4", "min", "$6.20", "$196.83"]
    assert all(len(line) <= 80 for line in lines)
    at = next(i for i, line in enumerate(lines) if line.split()[:2] == ["21", "slow"])
    assert lines[at].split() == ["21", "slow", "0.155", "50", "$5.20"]
    assert lines[at + 1].split() == ["fast", "0.155", "150", "$6.20"]
    assert any(
        line.split() == ["$6.20", "slow", "26", "0.205", "26,000", "9", "min", "$6.20"] for line in lines
    )


def test_a_run_without_a_step_is_named_and_no_run_is_compared_with_itself(home: Path) -> None:
    make_run("new", 8, 0, 1.0, 1)
    said = rlboost("compare", "slow", "new").stdout
    assert "Nothing to compare yet: no trained step of new." in said
    assert "The jobs are the same but for their names." in said
    assert json.loads(rlboost("compare", "slow", "new", "--json").stdout)["same"] == {}
    for names in (["slow"], ["slow", "slow"], ["slow", "fast", "slow"]):
        assert "two or more different runs" in rlboost("compare", *names, code=2).output
    assert "nobody" in rlboost("compare", "slow", "nobody", code=3).output


def test_runs_that_differ_in_the_seed_only_have_error_bars(home: Path) -> None:
    for seed, reward in enumerate((0.0, 0.1, 0.2), 1):
        make_run(f"seed-{seed}", 8, 20 + seed, 20.0, 36, seed=seed, reward=reward)
    names = ["seed-1", "seed-2", "seed-3"]
    (group,) = json.loads(rlboost("compare", *names, "fast", "--json").stdout)["over_seeds"]
    assert (group["runs"], group["fields"], group["step"]) == (names, {"algorithm.group_size": 8}, 21)
    assert group["reward_mean"] == pytest.approx(0.255)
    assert group["reward_error"] == pytest.approx(0.1 / 3**0.5)
    said = rlboost("compare", *names, "fast").stdout.splitlines()
    assert ["algorithm.group_size", "seed-1", "8"] in [line.split() for line in said]
    assert all(len(line) <= 80 for line in said)
    assert any(
        line.split() == ["group_size", "8", "3", "21", "0.255", "+-", "0.058", "-", "$5.20"]
        or line.split()[:8] == ["group_size", "8", "3", "21", "0.255", "+-", "0.058", "0.700"]
        for line in said
    ), said
    assert json.loads(rlboost("compare", "slow", "fast", "--json").stdout)["over_seeds"] == []
