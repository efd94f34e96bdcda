"""Live many seeds of the simulated shells.

    python -m benchmarks.shells --seeds 1000 --out shells.json
    python -m benchmarks.shells --seed 17 --trace

The first lives seeds from `--first` on, in as many processes as there are cores; a seed that breaks a promise
prints which one and how to live it again. The last line is one JSON object with `pass`. The second lives one
seed and tells its story. `--faults` names the kinds of fault that may happen, so that a failing seed can be
narrowed down; `--shrink` does that by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

from benchmarks.checkout import commit
from benchmarks.shells.world import Lived, live

CHUNK, CHUNKS = 4, 50
"""Seeds that a worker takes at once, and how often before another one takes its place."""
HASH_SEED = "0"
"""Sets of strings have the same order in every process then."""


def main() -> int:
    """Return 0 if every seed kept every promise."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.shells", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shells")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, help="live this one only")
    parser.add_argument("--trace", action="store_true", help="tell its story")
    parser.add_argument("--faults", type=lambda text: frozenset(text.split(",")))
    parser.add_argument("--shrink", action="store_true", help="find the fewest kinds of fault that break it")
    asked = parser.parse_args()
    if asked.seed is not None:
        return _one(asked.seed, asked.trace, asked.faults, asked.shrink)
    return _many(asked.first, asked.seeds, asked.processes, asked.out)


def _one(seed: int, trace: bool, faults: frozenset[str] | None, shrinks: bool) -> int:
    lived = live(seed, say=print if trace else None, faults=faults)
    if lived.broken and shrinks:
        kinds = shrunk(seed, lived)
        print(f"breaks with these kinds alone: {','.join(sorted(kinds))}")
    print(json.dumps(_as_json(lived)))
    return 1 if lived.broken else 0


def shrunk(seed: int, lived: Lived) -> frozenset[str]:
    """Return the fewest kinds of fault, one left out after the other, with which the seed still breaks."""
    kinds = frozenset(lived.faults)
    for kind in sorted(kinds):
        fewer = kinds - {kind}
        if live(seed, faults=fewer).broken:
            kinds = fewer
    return kinds


def _many(first: int, num: int, processes: int, out: Path | None) -> int:
    began, failed = time.monotonic(), list[int]()
    faults: Counter[str] = Counter()
    seconds = messages = events = tokens = 0.0
    context = multiprocessing.get_context(
        "spawn"
    )  # workers end now and then: what seeds leave is kept in them
    with context.Pool(processes, maxtasksperchild=CHUNKS) as pool:
        seeds = range(first, first + num)
        for number, lived in enumerate(pool.imap(partial(live, is_kept=True), seeds, chunksize=CHUNK), 1):
            faults += lived.faults
            seconds += lived.seconds
            messages, events, tokens = (
                messages + lived.num_messages, events + lived.num_events, tokens + lived.num_tokens
            )  # fmt: skip
            if lived.broken:
                failed.append(lived.seed)
                print(f"seed {lived.seed}: {'; '.join(lived.broken)}")
                print(f"  again: python -m benchmarks.shells --seed {lived.seed} --trace", flush=True)
            if number % 500 == 0:
                print(f"{number} seeds, {time.monotonic() - began:.0f} s", flush=True)
    found = {
        "seeds": num,
        "first": first,
        "simulated_hours": round(seconds / 3600, 1),
        "messages": int(messages),
        "events": int(events),
        "tokens_trained": int(tokens),
        "faults": dict(sorted(faults.items())),
        "num_faults": faults.total(),
        "wall_s": round(time.monotonic() - began, 1),
        "machine": f"{os.cpu_count()} cores",
        "commit": commit(),
        "failed": failed,
        "pass": not failed,
    }
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 1 if failed else 0


def _as_json(lived: Lived) -> dict[str, object]:
    return {
        "seed": lived.seed,
        "simulated_s": round(lived.seconds, 3),
        "messages": lived.num_messages,
        "events": lived.num_events,
        "faults": dict(sorted(lived.faults.items())),
        "trace": lived.trace,
        "broken": lived.broken,
        "pass": not lived.broken,
    }


if __name__ == "__main__":
    sys.exit(main())
