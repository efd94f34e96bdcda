"""The sandbox of reward functions, as the kernel keeps it."""

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from rlboost_cli.doctor.findings import Verdict
from rlboost_cli.doctor.job import judge_sandbox
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.protocol.reward_failures import RewardFailure
from rlboost_runtime.trainer.rewards import sandbox as sandboxes
from rlboost_runtime.trainer.rewards.outcome import Reward
from rlboost_runtime.trainer.rewards.sandbox import OFF, Sandbox
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("bwrap") is None, reason="no bubblewrap"),
]

CURIOUS = """
import os, socket, subprocess, time
from pathlib import Path

here = Path(__file__).parent

def score(prompt, response, row):
    what = row["what"]
    if response == "read": return len(Path(what).read_text())
    if response == "list": return len(os.listdir(what))
    if response == "write": Path(what).write_text("x"); return 1
    if response == "processes": return sum(name.isdigit() for name in os.listdir("/proc"))
    if response == "connect": socket.create_connection(("127.0.0.1", what), 2).close(); return 1
    if response == "variable": return 1.0 if what in os.environ else 0.0
    if response == "beside": return float((here / "factor.txt").read_text())
    if response == "hang": subprocess.Popen(["sleep", what]); time.sleep(1000)
    if response == "crash": os.kill(os.getpid(), 11)
    if response == "torch":
        import torch
        return float(torch.ones(3).sum())
"""


def job_of(**fields: object) -> Job:
    return Job.model_validate(
        {"name": "a", "model": {"init": "tiny"}, "data": {"source": "prompts.jsonl"}, **fields}
    )


def ask(
    folder: Path, sandbox: Sandbox, response: str, what: object = None, timeout_s: float = 20.0
) -> Reward:
    files = folder / "files"
    files.mkdir(exist_ok=True)
    (files / "rewards.py").write_text(CURIOUS)
    (files / "factor.txt").write_text("2.5")
    with RewardScorer(
        "rewards.py:score", files, timeout_s=timeout_s, log_file=folder / "log", sandbox=sandbox
    ) as scorer:
        (found,) = scorer.score([RewardCall("p", response, {"what": what})])
    return found


INSIDE = Sandbox("required")


def test_function_reads_its_own_files_and_packages(tmp_path):
    assert ask(tmp_path, INSIDE, "beside") == Reward(2.5)
    assert ask(tmp_path, INSIDE, "torch") == Reward(3.0)


@pytest.mark.parametrize("kind", ["token", "home", "temporary"])
def test_secrets_are_not_there(tmp_path, monkeypatch, kind):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path / "rlboost"))
    secret = {
        "token": tmp_path / "rlboost" / "runs" / "a" / "secrets" / "token",
        "home": home / ".aws" / "credentials",
        "temporary": tmp_path / "someone-elses",
    }[kind]
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("1234567")
    assert ask(tmp_path, OFF, "read", str(secret)) == Reward(7.0)
    found = ask(tmp_path, INSIDE, "read", str(secret))
    assert found.failure is RewardFailure.RAISED
    assert "No such file" in found.problem


def test_nothing_can_be_written_but_its_own_tmp(tmp_path):
    for place in (tmp_path / "files" / "rewards.py", Path("/etc/rlboost-was-here")):
        found = ask(tmp_path, INSIDE, "write", str(place))
        assert "Read-only file system" in found.problem
    assert ask(tmp_path, INSIDE, "write", "/tmp/rlboost-was-here") == Reward(1.0)
    assert not Path("/tmp/rlboost-was-here").exists()


def test_other_processes_are_not_seen(tmp_path):
    assert ask(tmp_path, OFF, "processes").value > 5
    assert ask(tmp_path, INSIDE, "processes").value <= 3


def test_network_only_where_asked(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ask(tmp_path, Sandbox("required", has_network=True), "connect", port) == Reward(1.0)
        assert ask(tmp_path, INSIDE, "connect", port).failure is RewardFailure.RAISED


def test_environment_is_the_jobs_own(tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "JUDGE_KEY", "COLOUR"):
        monkeypatch.setenv(name, "x")
    job = job_of(
        reward="rewards.py:score", env={"COLOUR": "x"}, secrets=["JUDGE_KEY", "AWS_SECRET_ACCESS_KEY"]
    )
    for with_network, there in ((False, {"COLOUR", "PATH"}), (True, {"COLOUR", "PATH", "JUDGE_KEY"})):
        sandbox = Sandbox.of(job.model_copy(update={"reward_network": with_network}))
        names = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "JUDGE_KEY", "COLOUR", "PATH")
        assert {name for name in names if ask(tmp_path, sandbox, "variable", name).value} == there


def test_a_call_that_hangs_leaves_nothing(tmp_path):
    mark = f"1000.{os.getpid()}"
    assert ask(tmp_path, INSIDE, "hang", mark, timeout_s=1.0).failure is RewardFailure.TIMEOUT
    deadline = time.monotonic() + 10
    while any(
        mark in each.info["cmdline"] for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]
    ):
        assert time.monotonic() < deadline, "a process of the sandbox lives on"
        time.sleep(0.05)


def test_how_a_process_ended_is_told(tmp_path):
    assert signal.Signals.SIGSEGV.name in ask(tmp_path, INSIDE, "crash").problem


def test_without_bubblewrap(tmp_path, monkeypatch):
    monkeypatch.setattr(sandboxes, "_problem", lambda: "bubblewrap is not installed")
    assert ask(tmp_path, Sandbox("auto"), "beside") == Reward(2.5)
    with pytest.raises(ConfigError, match="reward_sandbox: required, but bubblewrap is not installed"):
        ask(tmp_path, INSIDE, "beside")


def test_doctor_says_which(tmp_path):
    job = job_of(reward="rewards.py:score")
    assert judge_sandbox(job, "").found == "reward functions run in bubblewrap, without a network"
    assert judge_sandbox(job, "bubblewrap is not installed").verdict is Verdict.WARN
    assert json.loads(job.canonical_json())["reward_sandbox"] == "auto"


def test_temporary_files_of_runs_are_hidden_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "_HIDDEN", ())  # as if the test's folder were not in /tmp
    for name in ("rlboost-this", "rlboost-other", "mine"):
        (tmp_path / "scratch" / name).mkdir(parents=True)
        (tmp_path / "scratch" / name / "secret").write_text("abc")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch" / "rlboost-this"))
    found = {
        name: ask(tmp_path, Sandbox("required"), "read", str(tmp_path / "scratch" / name / "secret")).failure
        for name in ("rlboost-this", "rlboost-other", "mine")
    }
    assert found["mine"] is None
    assert found["rlboost-this"] is not None
    assert found["rlboost-other"] is not None
