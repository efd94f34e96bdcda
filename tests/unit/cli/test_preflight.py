"""What `launch` checks before anything is bought or started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.doctor import preflight
from rlboost_cli.doctor.findings import DoctorContext, Verdict
from rlboost_cli.main import app
from rlboost_cli.runs import supervision
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job.file.load import load_job

JOB = """\
name: demo
model: {init: tiny}
data: {source: prompts.jsonl, prompt_field: text}
reward: rewards.py:score
"""


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "MY_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rewards.py").write_text("def score(response, row):\n    return float(row['answr'])\n")
    (tmp_path / "prompts.jsonl").write_text('{"text": "a", "answer": "1"}\n')
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def context(job_file: Path, more: str = "") -> DoctorContext:
    job_file.write_text(JOB + more)
    return DoctorContext(job_file.parent / "home", load_job(job_file), job_file)


def test_a_reward_that_cannot_score_a_row_starts_nothing(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any) -> None:
        raise ConfigError("started", "")

    monkeypatch.setattr(supervision, "bring_up", started)
    refused = CliRunner().invoke(app, ["launch", str(job_file), "--yes"])
    assert refused.exit_code == 2
    assert "KeyError: 'answr'" in refused.output
    assert "--no-doctor" in refused.output
    assert not (job_file.parent / "home" / "runs").exists()
    assert (
        "error: started" in CliRunner().invoke(app, ["launch", str(job_file), "--yes", "--no-doctor"]).output
    )
    again = CliRunner().invoke(app, ["launch", "demo", "--yes"])
    assert "error: started" in again.output, "an open run goes on"


def test_all_that_is_missing_is_named_at_once(job_file: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.require_launchable(context(job_file, "secrets: [MY_KEY]\n"), lambda words: None)
    assert "secrets: " in refused.value.problem
    assert "reward: " in refused.value.problem


def test_a_sound_job_passes_without_a_word(job_file: Path) -> None:
    (job_file.parent / "rewards.py").write_text(
        "def score(response, row):\n    return float(row['answer'])\n"
    )
    said: list[str] = []
    preflight.require_launchable(context(job_file), said.append)
    assert said == []


@pytest.mark.parametrize(
    ("wandb", "key", "verdict"),
    [
        ("{project: p}", "", Verdict.FAIL),
        ("{project: p}", "k", Verdict.OK),
        ("{project: p, offline: true}", "", Verdict.OK),
    ],
)
def test_a_tracker_needs_its_key(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, wandb: str, key: str, verdict: Verdict
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("WANDB_API_KEY", key)
    (finding,) = preflight.tracker(context(job_file, f"tracking: {{wandb: {wandb}}}\n"))
    assert finding.verdict is verdict


def test_a_tracker_needs_its_package(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (finding,) = preflight.tracker(context(job_file, "tracking: {wandb: {project: p}}\n"))
    assert "rlboost[track]" in finding.remedy


def test_an_engine_that_is_not_installed_is_found(job_file: Path) -> None:
    vllm = "rollout: {engine: vllm, engine_args: {python: /nowhere/python}}\n"
    (finding,) = preflight.engine(context(job_file, vllm))
    assert finding.verdict is Verdict.FAIL
    assert "/nowhere/python" in finding.found
    assert list(preflight.engine(context(job_file))) == []
