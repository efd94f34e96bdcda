"""A trainer over two machines: the head, and a network namespace with a stack of its own, met over a wire."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from rlboost_runtime.protocol.messages import StepStartedMessage
from tests.integration.trainer.test_trainer import STEPS, Coordinator, go, lines, make_run, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

HEAD, NODE, PORT = "10.232.77.1", "10.232.77.2", 29477
_NO_NAMESPACE = "a network namespace cannot be made here ({}): run as root"


class Machine(NamedTuple):
    """A network namespace that is reached over a pair of virtual interfaces."""

    name: str


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


PREFIX = "rlbt"


def sweep() -> None:
    """Take away what killed test runs have left: its address would answer in place of ours."""
    for line in ip("netns", "list").stdout.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not Path(f"/proc/{name.removeprefix(PREFIX)}").exists():
            ip("netns", "delete", name)


@pytest.fixture
def machine() -> Iterator[Machine]:
    sweep()
    name = f"{PREFIX}{os.getpid()}"
    made = ip("netns", "add", name)
    if made.returncode:
        told = _NO_NAMESPACE.format(made.stderr.strip())
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    try:
        here, there = f"h{name}", f"n{name}"
        for words in (
            ("link", "add", here, "type", "veth", "peer", "name", there, "netns", name),
            ("addr", "add", f"{HEAD}/30", "dev", here),
            ("link", "set", here, "up"),
            ("-n", name, "addr", "add", f"{NODE}/30", "dev", there),
            ("-n", name, "link", "set", there, "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ):
            done = ip(*words)
            assert done.returncode == 0, (words, done.stderr)
        yield Machine(name)
    finally:
        ip("netns", "delete", name)  # takes the interfaces with it


@pytest.fixture(autouse=True)
def one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))


def start_node(machine: Machine, run: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the second node: it has nothing of the run's, not even its folder."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
        "RLBOOST_HOME": str(folder),
    }  # fmt: skip
    command = [
        *("ip", "netns", "exec", machine.name, sys.executable, "-m", "rlboost_runtime.trainer.node"),
        *(f"{HEAD}:{PORT}", run, "1", "2", "1"),
    ]
    return subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.PIPE)


@pytest.mark.e2e  # half a minute
def test_two_machines_train_what_one_would(machine: Machine, tmp_path: Path) -> None:
    alone = make_run(tmp_path, "alone")
    with Coordinator(alone):
        wanted = load_file(go(alone) / "model.safetensors")
    run = make_run(tmp_path, trainer={"nodes": 2, "node_address": f"{HEAD}:{PORT}"})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    node = start_node(machine, run.name, elsewhere)
    with Coordinator(run) as coordinator:
        head = start(run)
        try:
            _, errors = head.communicate(timeout=300)
            assert head.returncode == 0, errors.decode()
            _, told = node.communicate(timeout=60)
            assert node.returncode == 0, told.decode()
        finally:
            for process in (head, node):
                process.kill()
                process.communicate()
    assert [m.step for m in coordinator.of(StepStartedMessage)] == list(range(STEPS))
    assert [line["step"] for line in lines(run)] == list(range(STEPS))
    found = load_file(run.checkpoints / "model" / "model.safetensors")
    for name, tensor in found.items():
        assert (tensor - wanted[name]).norm() <= 1e-3 * wanted[name].norm(), name
    assert list(elsewhere.iterdir()) == [], "a node keeps nothing"
    state = json.loads((run.checkpoints / f"step-{STEPS - 1:06d}" / "state.json").read_text())
    assert state["step"] == STEPS - 1
