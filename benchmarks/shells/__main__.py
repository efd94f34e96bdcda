"""Live many seeds of the simulated shells.

    python -m benchmarks.shells --seeds 1000 --out shells.json
    python -m benchmarks.shells --seed 17 --trace

The first lives seeds from `--first` on, in as many processes as there are cores; a seed that breaks a promise
prints which one and how to live it again. The last line is one JSON object with `pass`. It may be stopped:
with the same `--out`, at the same commit, it goes on where it was. The second lives one seed and tells its
story. `--faults` names the kinds of fault that may happen, so that a failing seed can be narrowed down;
`--shrink` does that by itself.
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
from typing import Any

from benchmarks.checkout import commit
from benchmarks.shells.world import Lived, live

CHUNK, CHUNKS = 4, 50
"""Seeds that a worker takes at once, and how often before another one takes its place."""
KEPT_EVERY = 500
"""Seeds after which a result is written, to go on from."""
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
    """Live seeds; with `out`, go on behind those that the same commit has lived there already."""
    total = _begun(first, out)
    done = total["seeds"]
    if done:
        print(f"{done} of {num} seeds are in {out}", flush=True)
    context = multiprocessing.get_context(
        "spawn"
    )  # workers end now and then: what seeds leave is kept in them
    began, before_s = time.monotonic(), total["wall_s"]
    with context.Pool(processes, maxtasksperchild=CHUNKS) as pool:
        seeds = range(first + done, first + num)
        for number, lived in enumerate(
            pool.imap(partial(live, is_kept=True), seeds, chunksize=CHUNK), done + 1
        ):
            _add(total, lived)
            total["wall_s"] = round(before_s + time.monotonic() - began, 1)
            if lived.broken:
                print(f"seed {lived.seed}: {'; '.join(lived.broken)}")
                print(f"  again: python -m benchmarks.shells --seed {lived.seed} --trace", flush=True)
            if number % KEPT_EVERY == 0:
                print(f"{number} seeds, {total['wall_s']:.0f} s", flush=True)
                _keep(total, out)
    _keep(total, out)
    print(json.dumps(_result(total)))
    return 1 if total["failed"] else 0


def _begun(first: int, out: Path | None) -> dict[str, Any]:
    nothing: dict[str, Any] = {
        "seeds": 0, "first": first, "simulated_s": 0.0, "messages": 0, "events": 0, "tokens_trained": 0,
        "faults": {}, "wall_s": 0.0, "machine": f"{os.cpu_count()} cores", "commit": commit(), "failed": [],
    }  # fmt: skip
    if out is None or not out.exists():
        return nothing
    known: dict[str, Any] = json.loads(out.read_bytes())
    is_same = all(known.get(name) == nothing[name] for name in ("first", "commit", "machine"))
    return {name: known[name] for name in nothing} if is_same and "simulated_s" in known else nothing


def _add(total: dict[str, Any], lived: Lived) -> None:
    total["seeds"] += 1
    total["simulated_s"] += lived.seconds
    total["messages"] += lived.num_messages
    total["events"] += lived.num_events
    total["tokens_trained"] += lived.num_tokens
    total["faults"] = dict(sorted((Counter(total["faults"]) + lived.faults).items()))
    if lived.broken:
        total["failed"].append(lived.seed)


def _result(total: dict[str, Any]) -> dict[str, Any]:
    return {
        **total,
        "simulated_hours": round(total["simulated_s"] / 3600, 1),
        "num_faults": sum(total["faults"].values()),
        "pass": not total["failed"],
    }


def _keep(total: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(_result(total), indent=1) + "\n")


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
