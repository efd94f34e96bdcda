"""`rlboost chaos`: what it refuses, what a seed draws, and what its verdict says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from rlboost_cli.commands.end import Fault
from rlboost_cli.evidence import chaos
from rlboost_cli.main import app
from rlboost_runtime.errors import ConfigError, NotFound
from rlboost_runtime.processes import run_environment, start_session, tags
from rlboost_runtime.run.folder import RunFolder, write_json


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    folder = RunFolder(tmp_path / "runs" / "stormy")
    folder.path.mkdir(parents=True)
    write_json(folder.job_json, {"evidence": {"keep_journal": True}, "trainer": {"infra": "local"}})
    return folder


def made(run: RunFolder, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[str]:
    """The kinds that a seed draws, with a stand-in for each."""
    said: list[str] = []
    monkeypatch.setattr(chaos, "_wait_while_open", lambda run, seconds: None)
    for kind in chaos.FAULTS:
        monkeypatch.setitem(chaos.FAULTS, kind, lambda run, random, kind=kind: f"{kind} {random.random()}")
    chaos.make_faults(run, seed=seed, kinds=chaos.FAULTS, every_s=1.0, seconds=60.0, most=20, say=said.append)
    return said


def test_a_seed_draws_the_same_faults_again(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(run, monkeypatch, 3) == made(run, monkeypatch, 3) != made(run, monkeypatch, 4)
    assert len({words.split()[0] for words in made(run, monkeypatch, 3)}) > 4


def test_every_kind_is_an_option(run: RunFolder) -> None:
    assert [each.value for each in Fault] == list(chaos.FAULTS)


def test_an_ended_run_stops_it_and_a_run_without_evidence_is_refused(run: RunFolder) -> None:
    write_json(run.outcome, {"state": "done"})
    done = chaos.make_faults(
        run, seed=0, kinds=["process"], every_s=1.0, seconds=60.0, most=None, say=lambda words: None
    )
    assert done.faults.total() == 0
    with pytest.raises(NotFound, match="has ended"):
        chaos.require_evidence(run)
    run.outcome.unlink()
    write_json(run.job_json, {"evidence": {"keep_journal": False}})
    with pytest.raises(ConfigError, match=r"evidence\.keep_journal"):
        chaos.require_evidence(run)


def test_rented_machines_need_consent(run: RunFolder) -> None:
    offers = {"spot": {"any_of": [{"infra": "aws/us-east-1"}]}}
    write_json(run.job_json, {"evidence": {"keep_journal": True}, "rollout": offers})
    refused = CliRunner().invoke(app, ["chaos", "stormy"])
    assert refused.exit_code == 2
    assert "--yes-this-costs" in refused.output


def sleeper(run: RunFolder, **of: str) -> subprocess.Popen[bytes]:
    environment = run_environment(run.path) | tags(run.path, **of)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    return start_session(command, environment, run.path, run.path / "log")


def test_processes_are_killed_and_stopped_and_continue(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, machine = sleeper(run, role="coordinator"), sleeper(run, machine="spot-1")
    both = [psutil.Process(child.pid) for child in (head, machine)]
    until_stopped = time.sleep

    def wait(seconds: float) -> None:
        while psutil.STATUS_STOPPED not in {each.status() for each in both}:
            until_stopped(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", wait)
        assert chaos.FAULTS["pause"](run, Random(0)).startswith("stopped process")
    while psutil.STATUS_STOPPED in {each.status() for each in both}:
        time.sleep(0.01)
    assert "spot-1" in chaos.FAULTS["process"](run, Random(0))
    assert machine.wait(10) == -signal.SIGKILL
    assert chaos.FAULTS["coordinator"](run, Random(0)) == "killed the coordinator (SIGKILL)"
    assert head.wait(10) == -signal.SIGKILL
    assert chaos.FAULTS["process"](run, Random(0)) == chaos.FAULTS["trainer"](run, Random(0)) == ""


@pytest.mark.parametrize(
    ("state", "problems", "left", "words"),
    [
        ("done", [], [], "passed: every response ended once"),
        ("failed", [], [], "failed: the run failed; rlboost logs stormy"),
        ("done", ["response 3 has 5 tokens twice"], ["machine spot-2"], "machine spot-2 is left"),
    ],
)
def test_the_verdict_says_what_failed(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    problems: list[str],
    left: list[str],
    words: str,
) -> None:
    audit: dict[str, Any] = {
        "clean": not problems,
        "problems": problems,
        "responses": {"requested": 8, "finished": 8},
        "tokens": {"accepted": 1000, "lost": 7},
    }
    write_json(run.outcome, {"state": state})
    monkeypatch.setattr(chaos, "audit_of", lambda run: audit)
    found = chaos.verdict(run, chaos.Chaos(5, Counter(trainer=2)))
    found["left"], found["pass"] = left, found["pass"] and not left
    assert found["pass"] == words.startswith("passed")
    text = "\n".join(chaos.verdict_lines(json.loads(json.dumps(found))))
    assert words in text
    assert "2 trainer" in text
