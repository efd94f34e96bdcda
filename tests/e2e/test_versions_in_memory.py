"""Versions in /dev/shm: served, lost with all processes, made again from the checkpoint, gone at the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.manifest import Manifest, read_manifest
from rlboost_runtime.weights.store.store import WeightStore

pytestmark = pytest.mark.e2e


def in_shm(home: Path) -> set[Path]:
    """Where folders below `home` lie in main memory."""
    links = [path for path in home.rglob("*") if path.is_symlink()]
    return {path.resolve() for path in links if in_memory.root_of(path) is not None}


def manifests(run: RunFolder) -> dict[int, Manifest]:
    found = {}
    for path in run.weights.glob("v[0-9]*"):
        try:
            manifest = read_manifest(path)
        except ProtocolError:  # deleted this moment
            continue
        found[manifest.version] = manifest
    return found


@pytest.mark.soak
def test_a_killed_head_publishes_the_same_again_and_nothing_is_left(cli: Any) -> None:
    job = cli.job("mem", algorithm={"steps": 6}, trainer={"checkpoint_every_steps": 1})
    cli("launch", job, "--detach", "--yes")
    cli.wait("mem", lambda s: s["step"] >= 2, timeout_s=240)
    run = cli.run_folder("mem")
    assert cli.json("status", "mem")["weights"]["kept_in"] == "/dev/shm"
    there = in_shm(cli.home)
    assert run.weights.resolve() in there
    assert any("reserved" in str(path) for path in cli.home.rglob("*") if path.is_symlink())
    assert in_memory.sweep() == 0 or there == in_shm(cli.home), "all of it is held"

    kill_tagged(run.path)
    store = WeightStore(run.weights)
    published = {each.version: each for each in store.former()}
    cli("gc", "--yes")
    assert not any(path.exists() for path in there)

    cli("launch", job, "--detach", "--yes", "--resume")
    again: dict[int, Manifest] = {}

    def looks(status: dict[str, Any]) -> bool:
        again.update(manifests(run))
        return bool(status["step"] >= 5)

    cli.wait("mem", looks, timeout_s=240, poll_s=0.02)
    same = published.keys() & again.keys()
    assert same, "the checkpoint's version has its number again"
    assert all(published[number].content_digest == again[number].content_digest for number in same)
    there = in_shm(cli.home)
    assert there
    assert cli.wait_outcome("mem", timeout_s=240)["state"] == "done"
    cli("down", "mem", "--yes")
    assert not any(path.exists() for path in there)
    assert in_shm(cli.home) == set()


def test_down_frees_what_a_killed_run_had(cli: Any) -> None:
    job = cli.job("gone", algorithm={"steps": 50})
    cli("launch", job, "--detach", "--yes")
    cli.wait("gone", lambda s: s["step"] >= 1, timeout_s=240)
    there = in_shm(cli.home)
    assert there
    kill_tagged(cli.run_folder("gone").path)
    cli("down", "gone", "--yes")
    assert not any(path.exists() for path in there)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_small_shm_means_the_disk(cli: Any) -> None:
    """As in a container of Docker's: a real tmpfs of 64 KB at /dev/shm, in a namespace of its own."""
    job = cli.job("small", algorithm={"steps": 2})
    inside = f"mount -t tmpfs -o size=64k none /dev/shm && exec {' '.join(command(job))}"
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside]
    done = subprocess.run(
        unshared, env=cli.environment, capture_output=True, text=True, check=False, timeout=600
    )
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("no namespaces here")
    assert done.returncode == 0, done.stderr + cli.tails()
    run = cli.run_folder("small")
    assert not run.weights.is_symlink()
    log = (run.logs / "trainer.log").read_text()
    assert "versions need" in log
    assert "/dev/shm has 0.0 GB" in log


def command(job: Path) -> list[str]:

    return [sys.executable, "-m", "rlboost_cli.main", "launch", str(job), "--yes"]
