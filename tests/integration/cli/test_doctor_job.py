"""The doctor with a job at hand: real tokenizer, reward in its child process, a machine of the local
provider."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.doctor import job as of_job
from rlboost_cli.doctor import local
from rlboost_cli.doctor.findings import DoctorContext, Finding, Verdict
from rlboost_cli.main import app
from rlboost_runtime.job.file.load import load_job

pytestmark = pytest.mark.integration

ROWS = [{"prompt": f"say {number}\n", "answer": str(number)} for number in range(40)]
REWARD = "def score(response, row):\n    return float(response == row['answer'])\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("RLBOOST_HOME", str(path))
    return path


def job_file(folder: Path, *, rows: list[dict[str, str]] = ROWS, reward: str = REWARD, **more: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(reward)
    fields = {
        "name": "demo",
        "model": "{init: tiny}",
        "data": "{source: prompts.jsonl}",
        "reward": "rewards.py:score",
        "algorithm": "{prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 8}",
        **more,
    }
    path = folder / "job.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    return path


def patient(path: Path, home: Path) -> DoctorContext:
    return DoctorContext(home, load_job(path), path)


def only(findings: Any) -> Finding:
    (finding,) = findings
    return finding


def test_a_good_job_passes_and_nothing_is_left(tmp_path: Path, home: Path) -> None:
    path = job_file(tmp_path / "work")
    before = sorted(each.name for each in path.parent.iterdir())
    done = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    found = json.loads(done.stdout)
    verdicts = {f["check"]: f["verdict"] for f in found["findings"]}
    wanted = {"model", "prompts", "reward", "cpus", "memory", "disk", "ports", "machines"}
    assert verdicts.keys() >= wanted
    assert {name: verdicts[name] for name in wanted - {"memory", "cpus"}} == dict.fromkeys(
        wanted - {"memory", "cpus"}, "ok"
    )
    assert (done.exit_code, found["exit_code"]) == (0, 0), done.stdout
    assert "... calling the reward" in done.stderr
    assert sorted(each.name for each in path.parent.iterdir()) == before, "the user's folder is only read"
    assert list(home.iterdir()) == []


def test_prompts_that_are_too_long_are_counted_by_the_real_tokenizer(tmp_path: Path, home: Path) -> None:
    long = {"prompt": "x" * 17, "answer": "1"}
    half = only(of_job.prompts(patient(job_file(tmp_path / "half", rows=[long, ROWS[0]] * 20), home)))
    assert (half.verdict, "50.0%" in half.found) == (Verdict.WARN, True)
    none = only(of_job.prompts(patient(job_file(tmp_path / "none", rows=[long] * 5), home)))
    assert (none.verdict, "shortest: 17" in none.found) == (Verdict.FAIL, True)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("import no_such_module\n" + REWARD, "No module named 'no_such_module'"),
        ("import helper\n" + REWARD, "No module named 'helper'"),  # is there, but `files` does not name it
        ("def score(response, row):\n    return row['gone']\n", "KeyError: 'gone'"),
        ("def score(response, row):\n    return float('nan')\n", "nan"),
        ("def score(response, row):\n    import os\n    os._exit(3)\n", "ended its process"),
        ("def score(response, row):\n    import time\n    time.sleep(60)\n", "took too long"),
    ],
    ids=["import", "not shipped", "raises", "nan", "dies", "hangs"],
)
def test_a_broken_reward_is_found_before_a_run(reward: str, words: str, tmp_path: Path, home: Path) -> None:
    path = job_file(tmp_path / "work", reward=reward, reward_timeout_s="1.0")
    (path.parent / "helper.py").write_text("")
    finding = only(of_job.reward(patient(path, home)))
    assert finding.verdict is Verdict.FAIL
    assert words in finding.found
    assert finding.remedy


def test_a_reward_that_does_not_know_the_answer_is_a_warning(tmp_path: Path, home: Path) -> None:
    path = job_file(tmp_path / "work", reward="def score(response, row):\n    return 0\n")
    assert only(of_job.reward(patient(path, home))).verdict is Verdict.WARN


def test_a_model_folder_that_is_broken_fails_and_its_sizes_are_not_guessed(
    tmp_path: Path, home: Path
) -> None:
    folder = tmp_path / "work" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "nothing that exists"}')
    path = job_file(tmp_path / "work", model="model")
    done = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    assert done.exit_code == 2
    verdicts = {f["check"]: f["verdict"] for f in json.loads(done.stdout)["findings"]}
    assert verdicts["model"] == "fail"
    assert (verdicts["memory"], verdicts["disk"], verdicts["prompts"]) == ("warn", "warn", "warn")


def test_a_machine_that_cannot_be_launched_is_a_failure(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(tmp_path / "work")
    good = only(local.machines(patient(path, home)))
    assert good.verdict is Verdict.OK
    monkeypatch.setattr(local, "STAND_IN", ["/no/such/program"])
    monkeypatch.setattr(local, "MACHINE_DEADLINE_S", 0.5)
    bad = only(local.machines(patient(path, home)))
    assert bad.verdict is Verdict.FAIL
    assert bad.remedy
