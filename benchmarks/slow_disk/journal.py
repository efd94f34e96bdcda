"""How long the journal takes to acknowledge, with and without checkpoints on its disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.checkout import REPOSITORY
from rlboost_runtime.coordinator.storage.journal import Journal
from rlboost_runtime.seams import SystemDisk

RECORDS_PER_S, RECORD_BYTES = 40, 4096
"""What eight instances of 16 responses send in frames of 50 ms, about."""


def _note(found: list[float], began: float) -> None:
    found.append(time.monotonic() - began)


async def acknowledgements(folder: Path, seconds: float) -> list[float]:
    """Append records as frames come, and return each one's seconds until it was on stable storage."""
    journal = Journal(folder, SystemDisk(), lambda problem: None)
    journal.start(asyncio.get_running_loop())
    journal.open_step(0, fresh=True)
    found: list[float] = []
    draw, end = random.Random(0), time.monotonic() + seconds
    while time.monotonic() < end:
        journal.append(os.urandom(RECORD_BYTES), partial(_note, found, time.monotonic()))
        await asyncio.sleep(draw.expovariate(RECORDS_PER_S))
    await journal.flushed()
    await journal.close()
    return found


def beside_checkpoints(folder: Path, seconds: float) -> tuple[list[float], list[dict[str, float]]]:
    """Return the same while a process writes checkpoints, and what that process said."""
    command = [sys.executable, "-m", "benchmarks.slow_disk.checkpoints", str(folder / "checkpoints")]
    child = subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        while not list((folder / "checkpoints").glob(".building-*/*")):
            time.sleep(0.05)
        found = asyncio.run(acknowledgements(folder / "journal", seconds))
        told, _ = child.communicate(timeout=600)
    finally:
        child.kill()
        child.wait()
    return found, [json.loads(line) for line in told.splitlines()]


def summary(found: list[float]) -> dict[str, float]:
    """Return quantiles in seconds."""
    found = sorted(found)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {
        "num": len(found), **{name: round(found[int(q * len(found))], 4) for name, q in at.items()},
        "max": round(found[-1], 4),
    }  # fmt: skip
