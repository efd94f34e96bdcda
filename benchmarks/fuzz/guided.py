"""Fuzzing guided by coverage, with atheris: what reads an agent's frames, the journal and the event log.

    pip install atheris==3.0.0
    python -m benchmarks.fuzz.guided --seconds 600

Each target (`targets.py`) has an equal share of the time, in a process of its own. An input that raises
anything, takes 20 s or 1 GB ends its process; it is written to the current folder and named. The last line is
one JSON object with `pass`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkout import commit

INSTRUMENTED = [
    "rlboost_runtime.coordinator.storage",
    "rlboost_runtime.protocol",
    "rlboost_runtime.core.base",
]
NAMES = ("wire", "records", "segment", "events")
HANG_S, MAX_MB = 20, 1_000


def main() -> int:
    """Fuzz all targets; 1 if one broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=NAMES, help="this one only, in this process")
    options = parser.parse_args()
    if options.target is not None:
        return _fuzz(options.target, options.seconds, options.seed)
    found = {name: _in_a_process(name, options.seconds / len(NAMES), options.seed) for name in NAMES}
    passed = all(each["exit_code"] == 0 for each in found.values())
    print(json.dumps({"commit": commit(), "seed": options.seed, "targets": found, "pass": passed}))
    return 0 if passed else 1


def _in_a_process(name: str, seconds: float, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.fuzz.guided", "--target", name]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    covered = re.findall(r"cov: (\d+)", ran.stderr)
    runs = re.search(r"stat::number_of_executed_units:\s+(\d+)", ran.stderr)
    if ran.returncode:
        sys.stderr.write(ran.stderr[-4_000:])
    return {
        "inputs": int(runs[1]) if runs else 0,
        "branches": int(covered[-1]) if covered else 0,
        "exit_code": ran.returncode,
    }


def _fuzz(name: str, seconds: float, seed: int) -> int:
    import atheris  # type: ignore[import-untyped]  # installed for this alone

    with atheris.instrument_imports(include=INSTRUMENTED):
        from benchmarks.fuzz.targets import Targets
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        targets = Targets(Path(folder))
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(targets.seeds(name)):
            (corpus / str(number)).write_bytes(data)
        limits = [f"-max_total_time={int(seconds)}", f"-timeout={HANG_S}", f"-rss_limit_mb={MAX_MB}"]
        atheris.Setup(
            [sys.argv[0], *limits, f"-seed={seed}", "-max_len=4096", "-print_final_stats=1", str(corpus)],
            targets.all[name],
        )
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
