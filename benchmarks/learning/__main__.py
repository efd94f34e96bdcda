"""Does the algorithm notice that its machines are killed? Quiet and stormy runs of one recipe, several seeds.

Each run is made by `rlboost launch`, one after the other, in a home of its own below `--out`. A run that was
finished is not repeated, so this may be stopped and started again. A run that was not what its name says (a
quiet one that lost a machine, a stormy one without enough kills) is set aside and made again; it stands in
the result under `void`. The result is `learning.json`, the pictures are `curves.svg` and `seeds.svg`.

    python -m benchmarks.learning [--seeds 0 1 2 3 4 5] [--steps 40] [--out build/learning]

The last line of stdout is a JSON object. Its value is the difference of the last-five mean rewards, in
standard errors; what else has to hold stands in `detail.verdicts`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkout import commit
from benchmarks.learning.analysis import MAX_STANDARD_ERRORS, last, summary, void_reason
from benchmarks.learning.conditions import Planned, planned
from benchmarks.learning.evidence import RunRecord
from benchmarks.learning.runs import Failed, Laboratory
from rlboost_runtime.run.folder import write_json

SEEDS = [0, 1, 2, 3, 4, 5]
STEPS = 40
MAX_TRIES = 3
REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    """Make what is missing, print the result; return 0 if the claim holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "learning")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        laboratory = Laboratory(arguments.out.absolute(), commit())
        records = make_all(laboratory, arguments.seeds, arguments.steps)
    except Failed as problem:
        say(f"error: {problem}")
        return 1
    result = report(records)
    runs = {"runs": [asdict(r) for r in records], "void": [asdict(r) for r in laboratory.void()]}
    write_json(arguments.out / "learning.json", result | runs)
    if len(arguments.seeds) > 1:
        from benchmarks.learning.pictures import draw

        draw(records, arguments.out)
    print(json.dumps(result))
    return 0 if result["pass"] else 1


def make_all(laboratory: Laboratory, seeds: Sequence[int], steps: int) -> list[RunRecord]:
    """Return the records of all runs, making those that are missing."""
    runs = planned(seeds, steps)
    records = []
    for number, each in enumerate(runs, start=1):
        say(f"run {number} of {len(runs)}: {each.name}")
        found = laboratory.stored(each) or _make(laboratory, each)
        say(
            f"{each.name}: last five {last(found):.4f}, {found.kills_in_rollout} kills and"
            f" {found.notices_in_rollout} notices inside rollouts, {found.responses['migrated']} responses"
            f" migrated, {found.seconds:.0f} s"
        )
        records.append(found)
    return records


def _make(laboratory: Laboratory, each: Planned) -> RunRecord:
    for _ in range(MAX_TRIES):
        found = laboratory.make(each, say)
        reason = void_reason(found)
        if reason is None:
            return found
        say(f"{each.name} is void: {reason}")
        laboratory.set_aside(each)
    raise Failed(f"{each.name} was void {MAX_TRIES} times: is the computer too busy?")


def report(records: Sequence[RunRecord]) -> dict[str, Any]:  # JSON
    """Return the benchmark's result."""
    found = summary(records)
    return {
        "name": "learning",
        "value": found["in_standard_errors"],
        "unit": "standard errors of the difference",
        "target": MAX_STANDARD_ERRORS,
        "pass": all(found["verdicts"].values()),
        "detail": {
            "what": "|stormy - quiet| of the mean reward over the last five steps, paired by seed",
            "commit": records[0].commit,
            "at": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            **found,
        },
    }


def machine() -> str:
    """Say what this ran on."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}"
    )


def say(line: str) -> None:
    """Show progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
