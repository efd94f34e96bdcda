"""`import rlboost`: it says what the commands say, and raises our own errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner

import rlboost
from rlboost_cli.main import app
from rlboost_cli.planning.agreement import agree
from rlboost_cli.planning.plan import LaunchPlan, PlanLine
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.run.folder import RunFolder, write_json
from tests.unit.cli.test_light_cli import HEAVY, PYTHON_PATH

JOB = {"name": "demo", "model": {"init": "tiny"}, "data": {"source": "prompts.jsonl"}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def folder() -> RunFolder:
    """Of a run of two steps that is done."""
    run = RunFolder.named("demo")
    run.logs.mkdir(parents=True)
    (run.logs / "trainer.log").write_text('{"at": 1000.0, "level": "info", "event": "step.trained"}\n')
    write_json(run.job_json, {"name": "demo", "algorithm": {"steps": 2}})
    write_json(run.status, {"run": "demo", "state": "done", "step": 2, "at": 1100.0, "reward_mean": 0.5})
    write_json(run.outcome, {"state": "done"})
    run.metrics.write_text("".join(json.dumps({"step": s, "reward_mean": s / 2}) + "\n" for s in range(2)))
    rows = [
        {"step": n // 2, "prompt": f"p{n}", "response": "<b>", "reward": n, "tokens": 1} for n in range(4)
    ]
    run.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = Ledger(run.ledger)
    ledger.intend(MachineRecord("spot-1", "local", "here", "cpu", 3_600_000_000, "job", 1000.0))
    ledger.launched("spot-1", 1000.0)
    ledger.ended("spot-1", 1100.0, "preempted")
    ledger.close()
    return run


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_says_what_the_commands_say(folder: RunFolder) -> None:
    (run,) = rlboost.runs()
    assert run == rlboost.Run("demo")
    assert repr(run) == "Run('demo')"
    status = json.loads(printed("status", "demo", "--json"))
    assert (
        (run.status().step, run.status().reward_mean) == (status["step"], status["reward_mean"]) == (2, 0.5)
    )
    assert run.cost().total_usd == json.loads(printed("cost", "demo", "--json"))["total_usd"] == 100.0
    assert run.logs() == printed("logs", "demo").rstrip("\n") != ""
    assert run.wait(timeout=0).state == "done"
    assert run.outcome == run.wait()


def test_steps_and_samples_are_rows_of_data_frames(folder: RunFolder) -> None:
    run = rlboost.Run("demo")
    assert isinstance(run.metrics(), pandas.DataFrame)
    assert run.metrics("reward_mean").to_dict("list") == {"step": [1, 2], "reward_mean": [0.0, 0.5]}
    assert run.samples()["prompt"].tolist() == ["p0", "p1", "p2", "p3"]
    shown = json.loads(printed("samples", "demo", "--step", "2", "--json"))["samples"]
    assert run.samples(step=2).to_dict("records") == shown
    assert {row["step"] for row in shown} == {2}
    with pytest.raises(rlboost.NotFound, match="no samples of step 3"):
        run.samples(step=3)
    with pytest.raises(rlboost.ConfigError, match="did you mean reward_mean"):
        run.metrics("reward_maen")


def test_without_pandas_the_rows_are_dictionaries(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert rlboost.Run("demo").metrics() == [
        {"step": 1, "reward_mean": 0.0},
        {"step": 2, "reward_mean": 0.5},
    ]


def test_a_wait_ends_in_time_and_leaves_the_run_open(folder: RunFolder) -> None:
    folder.outcome.unlink()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="demo has not ended within 0 s: it is at step 2") as raised:
        rlboost.Run("demo").wait(timeout=0)
    assert isinstance(raised.value, rlboost.RLBoostError)
    assert time.monotonic() - started < 30
    assert rlboost.Run("demo").outcome is None


def test_errors_are_ours_and_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rlboost.NotFound, match="no run gone"):
        rlboost.Run("gone")
    with pytest.raises(rlboost.ConfigError, match="no such job file") as raised:
        rlboost.launch(tmp_path / "gone.yaml")
    assert raised.value.remedy
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "file"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(rlboost.ConfigError, match="a part of it is a file, not a folder"):
        rlboost.launch({**JOB, "reward": "exact", "algorithm": {"steps": 1}}, checks=False)


def test_a_job_given_as_fields_is_judged_like_a_file(tmp_path: Path) -> None:
    with pytest.raises(rlboost.ConfigError) as raised:
        rlboost.launch({**JOB, "algorithm": {"group_sise": 8}})
    assert "job: algorithm.group_sise: unknown field; did you mean group_size?" in raised.value.problem
    assert "job-" not in str(raised.value)
    assert list(tmp_path.glob("job-*")) == [], "the file that was made of it is gone"


def test_a_program_agrees_to_costs_with_an_argument() -> None:
    plan = LaunchPlan(
        run="r", steps=1, lines=(PlanLine("spot", "cloudy", 1, 1),), max_spot_machines=1,
        max_usd=None, max_usd_per_hour=None,
    )  # fmt: skip
    with pytest.raises(rlboost.ConfigError, match="pass yes=True"):
        agree(plan, None, yes=False)
    agree(plan, None, yes=True)


def test_the_view_of_a_notebook_escapes_what_it_shows(folder: RunFolder) -> None:
    warning = {"code": "stuck", "text": "<img src=x onerror=alert(1)>"}
    write_json(folder.status, {"run": "demo", "state": "training", "step": 1, "warnings": [warning]})
    html = rlboost.Run("demo")._repr_html_()
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "<img" not in html
    assert "demo" in html


def test_importing_it_loads_nothing_heavy() -> None:
    script = "import rlboost, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": PYTHON_PATH}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert "rlboost_cli" in done.stdout
    assert not (HEAVY | {"pandas", "IPython"}) & set(done.stdout.split())
