"""Four ranks on a disk of 50 MB/s (emulated): training goes on, memory stays, any number of ranks resumes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("checkpoint_steps.py")
DISK_BYTES_PER_S = 50e6

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]


def start(folder: Path, what: str, num: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num),
    }  # fmt: skip
    command = [sys.executable, str(SCRIPT), str(folder), what]
    processes = []
    for rank in range(num):
        with (folder / f"{what}{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env={**common, "RANK": str(rank)}, stderr=log))
    return processes


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run of four ranks that was killed in mid-write, and what it measured before."""
    folder = tmp_path_factory.mktemp("run")
    processes, deadline = start(folder, "train", 4), time.monotonic() + 500
    try:
        while not (folder / "found.json").exists():
            assert all(each.poll() is None for each in processes), (folder / "train0.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.2)
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return folder, json.loads((folder / "found.json").read_text())


def test_training_stands_still_for_the_copy_alone(killed: tuple[Path, dict[str, Any]]) -> None:
    _, found = killed
    print(json.dumps({key: value for key, value in found.items() if key != "losses"}))
    assert len(found["write_s"]) >= 2
    assert all(each > 4 * found["shard_bytes"] / DISK_BYTES_PER_S for each in found["write_s"]), "throttled"
    assert found["stood_still_share"] < 0.05


def test_rank_0_needs_its_copy_and_little_more(killed: tuple[Path, dict[str, Any]]) -> None:
    _, found = killed
    assert 0 < found["extra_bytes"] < 1.5 * found["shard_bytes"]


@pytest.mark.parametrize("num", [2, 1])
def test_any_number_of_ranks_goes_on_from_the_one_before_that_was_being_written(
    killed: tuple[Path, dict[str, Any]], num: int
) -> None:
    folder, found = killed
    assert found["half_written"] > 0
    assert list((folder / "checkpoints").glob(".building-*")), "it was killed while it wrote"
    for process in start(folder, "resume", num):
        assert process.wait(timeout=300) == 0, (folder / "resume0.log").read_text()
    resumed = json.loads((folder / f"resumed-{num}.json").read_text())
    assert str(resumed["step"]) == max(found["saved"], key=int), "the newest one that was complete"
    assert resumed["loss"] == pytest.approx(found["losses"][str(resumed["step"] + 1)], abs=1e-6)
    number = found["saved"][str(resumed["step"])]
    wanted = [torch.load(folder / f"truth-{number}-{rank}.pt") for rank in range(4)]
    parts = [torch.load(folder / f"resumed-{num}-{rank}.pt") for rank in range(num)]
    assert wanted[0].keys() == parts[0].keys()
    for name in wanted[0]:
        whole, mine = (torch.cat([each[name] for each in ranks]) for ranks in (wanted, parts))
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-6)
