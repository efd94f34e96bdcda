"""How long is a step of episodes, by how many of them are open at once? Simulated.

    python -m benchmarks.scheduler.episodes --out episodes.jsonl

The preset agent-14b on six machines that stay. The first step is left out: it has the job's initial window.
One line of JSON per case is appended; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.paper.static import LONG_S, constant_trace
from rlboost_runtime.sim import agent_preset, simulate

MACHINES = 6
STEPS = 4
OPEN = (64, 128, 256, 512)
POLICIES = ("paper", "rlboost")


def run(policy: str, concurrency: int) -> dict[str, float]:
    """Return seconds and dollars of a settled step, and what of it was computed twice."""
    known = agent_preset()
    assert known.workload.turns is not None
    turns = replace(known.workload.turns, concurrency=concurrency)
    preset = replace(known, workload=replace(known.workload, turns=turns))
    trace = constant_trace(MACHINES)
    result = simulate(preset, trace, policy, seed=0, hours=LONG_S / 3600.0, max_steps=STEPS)
    rows = result.rows[1:]
    return {
        "step_s": round(fmean(row.seconds for row in rows), 1),
        "usd": round(fmean(row.usd for row in rows), 2),
        "spot_machines": round(fmean(row.spot_instances for row in rows), 2),
        "migrations": round(fmean(row.migrations for row in rows)),
        "tokens_per_s": round(sum(row.tokens for row in rows) / sum(row.seconds for row in rows)),
    }


def main() -> int:
    """Run what is missing; print every case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler.episodes")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    lines = out.read_text().splitlines() if out.exists() else []
    known = {(line["policy"], line["open"]) for line in map(json.loads, lines)}
    for concurrency, policy in product(OPEN, POLICIES):
        if (policy, concurrency) in known:
            continue
        line = {"policy": policy, "open": concurrency, **run(policy, concurrency)}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
