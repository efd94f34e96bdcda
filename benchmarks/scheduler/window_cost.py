"""What a simulated window costs: two hours, six machines, 1,024 responses a step, under each policy.

    python -m benchmarks.scheduler.window_cost --out window_cost.jsonl

One line of JSON per policy: CPU seconds on the machine that runs it, events and steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.paper.static import constant_trace
from rlboost_runtime.sim import POLICIES, presets, simulate

PRESET, MACHINES, HOURS = "paper-14b", 6, 2.0
LIMIT_S = 10.0
"""What a window may take."""


def cost_of(policy: str) -> dict[str, float | str]:
    """Simulate one policy."""
    began = time.process_time()
    result = simulate(presets()[PRESET], constant_trace(MACHINES), policy, seed=0, hours=HOURS)
    cpu_s = round(time.process_time() - began, 2)
    return {"policy": policy, "cpu_s": cpu_s, "events": result.events, "steps": result.steps}


def as_markdown(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a section of the report."""
    if not rows:
        return ["What a window costs has not been measured."]
    return [
        "## What a window costs",
        "",
        f"{PRESET}, {HOURS:g} hours, {MACHINES} machines that stay; at most {LIMIT_S:g} s are wanted.",
        "",
        "| policy | CPU s | events | steps |",
        "|---|---|---|---|",
        *(f"| {r['policy']} | {r['cpu_s']} | {r['events']:,} | {r['steps']} |" for r in rows),
    ]


def main(arguments: list[str]) -> int:
    """Run the policies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    lines = []
    for policy in POLICIES:
        lines.append(json.dumps(cost_of(policy)))
        print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
