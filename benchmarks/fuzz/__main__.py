"""Mutated messages of an agent and mutated files of a run against the coordinator.

    python -m benchmarks.fuzz --messages 100000 --files 10000 [--seed 0]

The last line is one JSON object with `pass`: no crash, no hang (20 s each), nothing of another agent touched,
and at most `MAX_GROWTH_MB` more memory at the end than after the first tenth of the messages. The same seed
gives the same mutations; what the coordinator does meanwhile differs from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkout import commit
from benchmarks.fuzz.files import Files, quiet
from benchmarks.fuzz.messages import Fuzz
from rlboost_runtime.core.state import machines

MAX_GROWTH_MB = 1_000.0
"""Twenty kilobytes for each of the machines that come and go: the core keeps those of the last minute."""

FORGET_AFTER_S = 60.0
"""The core forgets machines that are gone after so long here, not after ten minutes: in a run hardly any go
in that time, here thousands."""


def _rss_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def _fuzzed(folder: Path, messages: int, files: int, seed: int) -> dict[str, Any]:
    fuzz = Fuzz(folder / "run", seed)
    asyncio.run(fuzz.run(messages))
    mutated = Files(fuzz.made.driver.run, folder / "files", seed)
    mutated.run(files)
    growth = _rss_mb() - fuzz.rss_mb
    return {
        **fuzz.counts,
        **mutated.counts,
        "rss_growth_mb": round(growth),
        "rss_mb": round(_rss_mb()),
        "pass": growth <= MAX_GROWTH_MB,
    }


def main() -> int:
    """Run it; 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet()
    machines.FORGET_AFTER_S = FORGET_AFTER_S
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = _fuzzed(Path(folder), options.messages, options.files, options.seed)
        except Exception:  # noqa: BLE001 - whatever it is, the seed must be told
            traceback.print_exc()
            found = {"pass": False}
    summary = {"commit": commit(), "seed": options.seed, "seconds": round(time.monotonic() - began), **found}
    print(json.dumps(summary))
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
