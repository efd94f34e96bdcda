"""A run whose head is another machine, reached through a real sshd: launched, left alone, found again.

The "machine" is this one with another folder; its runtime is this Python (tests/cloud installs it)."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.processes import kill_tagged, tagged
from rlboost_runtime.run.folder import RunFolder
from tests.e2e.e2e_rig import PATIENCE, Cli
from tests.fakes.sshd import Sshd, make_home, sshd_on, switched_on_again

pytestmark = pytest.mark.e2e

REWARD = """
import os

def score(prompt, response):
    assert os.environ["JUDGE_KEY"][::-1] == "egduj-eht-fo", "the secret did not come along"
    assert os.environ["MARKS"] == "10", "the variable did not come along"
    return len(set(response)) / 100
"""
RUN_S = 240.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd_on(tmp_path / "sshd", make_home(tmp_path / "user")) as made:
        yield made


@pytest.fixture
def laptop(cli: Cli, server: Sshd, tmp_path: Path) -> Iterator[Cli]:
    """The command line of somebody who can reach the head, which keeps everything in `tmp_path/head`."""
    cli.environment |= {"HOME": str(server.home), "JUDGE_KEY": "of-the-judge"}
    cli.environment.pop("SSH_AUTH_SOCK", None)
    (cli.home / "rewards.py").write_text(REWARD)
    yield cli
    for run in (tmp_path / "head").glob("heads/*/runs/*"):
        kill_tagged(run)


def job_on(server: Sshd, cli: Cli, tmp_path: Path, name: str = "far", **changes: Any) -> Path:
    trainer = {
        "infra": "ssh",
        "hosts": [server.host],
        "folder": str(tmp_path / "head"),
        "python": sys.executable,
    }
    more = {"reward": "rewards.py:score", "env": {"MARKS": "10"}, "secrets": ["JUDGE_KEY"]}
    return cli.job(name, trainer=trainer, reward_network=True, **more, **changes)


def on_head(tmp_path: Path, name: str = "far") -> RunFolder:
    (found,) = (tmp_path / "head").glob(f"heads/*/runs/{name}")
    return RunFolder(found)


def has_spot(status: dict[str, Any]) -> bool:
    return any(m["pool"] == "spot" and m["state"] == "running" for m in status["machines"])


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + PATIENCE * seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.2)


def test_the_run_goes_on_with_the_laptop_off_and_is_all_there_when_it_is_back(
    laptop: Cli, server: Sshd, tmp_path: Path
) -> None:
    job = job_on(server, laptop, tmp_path, algorithm={"steps": 4})
    laptop("launch", job, "--yes", "--detach")
    far = on_head(tmp_path)
    status = laptop.json("status", "far")
    assert status["live"], status
    assert any(machine["id"] == "reserved-0" for machine in status["machines"])
    laptop.wait("far", lambda s: laptop.json("status", "far") and has_spot(s), 120, 1.0)
    assert "preempting " in laptop("preempt", "far", "spot-0").stdout
    assert "coordinator" in laptop("logs", "far").stdout

    server.stop()  # nobody can even ask any more: the laptop is closed
    assert not any("rlboost_cli" in " ".join(p.cmdline()) for p in tagged(far.path))
    silent = laptop("status", "far")
    assert "does not answer" in silent.stderr
    wait_for(far.outcome, RUN_S)
    assert json.loads(far.outcome.read_text())["state"] == "done"
    deadline = time.monotonic() + PATIENCE * 30
    while left := tagged(far.path):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)

    with switched_on_again(server):
        assert laptop.json("status", "far")["state"] == "done"
        ended = laptop("down", "far", "--yes")
        assert "nothing of far is still running" in ended.stderr
    here = laptop.run_folder("far")
    model = here.checkpoints / "model" / "model.safetensors"
    assert model.read_bytes() == (far.checkpoints / "model" / "model.safetensors").read_bytes()
    cost = laptop.json("cost", "far")  # the head is off: what was fetched is shown
    assert cost["state"] == "done"
    assert cost["tokens_trained"] > 0
    assert {machine["id"] for machine in cost["machines"]} >= {"reserved-0", "spot-0"}
    with sqlite3.connect(far.ledger) as ledger:
        assert ledger.execute("SELECT count(*) FROM machines WHERE ended_at IS NULL").fetchone() == (0,)
    assert "of-the-judge" not in "".join(
        path.read_text(errors="replace")
        for folder in (here.path, far.path, far.path.parents[1] / "shipped")
        for path in folder.rglob("*")
        if path.is_file() and path.name != "environment.json"
    )
    assert (far.environment.stat().st_mode & 0o777) == 0o600


def test_a_launch_that_was_cut_off_is_typed_again_and_an_ended_run_is_resumed(
    laptop: Cli, server: Sshd, tmp_path: Path
) -> None:
    job = job_on(server, laptop, tmp_path, algorithm={"steps": 2})
    first = laptop.start("launch", job, "--yes")
    wait_for(tmp_path / "head", 60)
    first.kill()
    first.communicate()
    laptop("launch", job, "--yes", timeout_s=RUN_S)  # watched to its end
    assert laptop.json("status", "far")["state"] == "done"
    assert (laptop.run_folder("far").checkpoints / "model" / "config.json").exists()
    job_on(server, laptop, tmp_path, algorithm={"steps": 3})
    laptop("launch", "far", "--resume", "--yes", timeout_s=RUN_S)
    assert [step["step"] for step in laptop.json("cost", "far")["steps"]] == [0, 1, 2]
    assert [path.name for path in (tmp_path / "head").glob("heads/*/runs/*")] == ["far"]
