"""Shell completion: what a shell asks for is what it gets, quickly and without ever failing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlboost_runtime.health.glossary import GLOSSARY
from rlboost_runtime.run.folder import RunFolder, write_json

ROOT = Path(__file__).resolve().parents[3]
PYTHON_PATH = os.pathsep.join(str(ROOT / part) for part in ("", "runtime", "providers", "templates"))
PROGRAM = "from rlboost_cli.main import run; run()"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, state in (("quick-1", "rollout"), ("quick-2", "rollout"), ("slow", "rollout")):
        run = RunFolder(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        write_json(run.job_json, {})
        write_json(run.status, {"state": state, "instances": INSTANCES})
    write_json(RunFolder(tmp_path / "runs" / "quick-2").outcome, {"state": "done"})
    return tmp_path


INSTANCES = [
    {"id": "reserved-0/0", "pool": "reserved", "state": "ready"},
    {"id": "spot-1/0", "pool": "spot", "state": "ready"},
    {"id": "spot-2/0", "pool": "spot", "state": "loading"},
]


def completed(home: Path, words: str, folder: Path | None = None) -> list[str]:
    """What bash is offered after `words`, of which the last is being typed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            "RLBOOST_HOME": str(home),
            "_RLBOOST_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return [word for word in done.stdout.split("\n") if word]


def test_commands_and_runs_are_offered(home: Path) -> None:
    assert completed(home, "rlboost sta") == ["status"]
    assert sorted(completed(home, "rlboost status q")) == ["quick-1", "quick-2"]
    assert sorted(completed(home, "rlboost down ")) == ["quick-1", "quick-2", "slow"]


def test_only_open_runs_and_their_spot_instances_can_be_preempted(home: Path) -> None:
    assert sorted(completed(home, "rlboost preempt ")) == ["quick-1", "slow"]
    assert completed(home, "rlboost preempt slow sp") == ["spot-1/0", "spot-2/0"]
    assert completed(home, "rlboost preempt nobody sp") == []


def test_launch_offers_job_files_folders_and_runs(home: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "jobs").mkdir(parents=True)
    (work / "job.yaml").touch()
    (work / "job.txt").touch()
    assert completed(home, "rlboost launch jo", work) == ["job.yaml", "jobs/"]
    assert completed(home, "rlboost launch slo", work) == ["slow"]


def test_logs_offer_what_there_are_logs_of(home: Path) -> None:
    logs = RunFolder(home / "runs" / "slow").logs
    (logs / "machines" / "spot-7").mkdir(parents=True)
    (logs / "coordinator.log").touch()
    assert completed(home, "rlboost logs slow ") == ["coordinator", "spot-7"]


def test_metrics_are_offered_by_name_each_once(home: Path) -> None:
    offered = completed(home, "rlboost metrics slow eval_")
    assert offered == [name for name in GLOSSARY if name.startswith("eval_")]
    assert completed(home, "rlboost metrics slow eval_reward_mean eval_reward") == ["eval_reward_best"]


def test_a_broken_home_offers_nothing_and_says_nothing(home: Path) -> None:
    RunFolder(home / "runs" / "slow").status.write_text("{")
    assert completed(home, "rlboost preempt slow ") == []
    assert completed(home / "nowhere", "rlboost status ") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_and_installed(shell: str, tmp_path: Path) -> None:
    def rlboost(option: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = ['rlboost', '{option}', '{shell}']; {PROGRAM}"],
            env={
                **os.environ,
                "PYTHONPATH": PYTHON_PATH,
                "HOME": str(tmp_path),
                "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = rlboost("--show-completion")
    assert f"_RLBOOST_COMPLETE=complete_{shell}" in script
    assert "completion installed" in rlboost("--install-completion")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(f"_RLBOOST_COMPLETE=complete_{shell}" in path.read_text() for path in files)
