"""How right is the seeding window one step after the number of machines changed? Simulated.

    python -m benchmarks.scheduler.after_change --out after_change.jsonl

Machines are taken, or come, as a step begins. The window of the next step is held against that of the same
step, with the same responses, in a run that had the new number of machines from the beginning: there it has
settled. One line of JSON per case is appended; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper.static import FIRST_WINDOWS_S, LONG_S, constant_trace, run_static
from rlboost_runtime.sim import presets, simulate
from rlboost_runtime.sim.result import StepRow
from rlboost_runtime.traces import Trace, TraceEvent

CHANGED_STEP = 4
"""Number of the step in which the machines change."""
STEPS = CHANGED_STEP + 2
WITHIN = 0.1
"""Of the settled window: the goal."""


@dataclass(frozen=True, slots=True)
class Change:
    """From so many machines to so many."""

    preset: str
    before: int
    after: int

    @property
    def key(self) -> str:
        """Name in the file of results."""
        return f"{self.preset} {self.before} -> {self.after}"


CHANGES = tuple(
    Change(*each)
    for each in (
        ("paper-8b", 4, 2),
        ("paper-8b", 2, 4),
        ("paper-14b", 6, 3),
        ("paper-14b", 3, 6),
        ("paper-14b", 6, 1),
        ("paper-14b", 5, 6),
        ("paper-32b", 3, 2),
        ("paper-32b", 2, 3),
    )
)


def run(change: Change) -> dict[str, float]:
    """Return the window of the step after the change, and the settled one of that step, in seconds."""
    known = presets()[change.preset]
    most, first_s = max(change.before, change.after), FIRST_WINDOWS_S[change.before]
    free = tuple(replace(shape, usd_per_hour=0.0) for shape in known.spot)  # all machines there are wanted
    known = replace(known, spot=free, max_spot_instances=most, seeding_initial_s=first_s)

    def rows(trace: Trace, steps: int) -> tuple[StepRow, ...]:
        return simulate(known, trace, "rlboost", seed=0, hours=LONG_S / 3_600.0, max_steps=steps).rows

    at_s = rows(constant_trace(change.before), CHANGED_STEP + 1)[CHANGED_STEP].started_s
    window_s = rows(_changing(change, at_s), STEPS)[CHANGED_STEP + 1].seeded_s
    settled = run_static(presets()[change.preset], change.after, "rlboost", steps=STEPS)
    settled_s = settled.rows[CHANGED_STEP + 1].seeded_s
    return {"window_s": window_s, "settled_s": settled_s, "off": window_s / settled_s - 1.0}


def as_markdown(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a section of the report."""
    if not found:
        return ["The window after a change in the number of machines has not been measured."]
    rows = [
        f"| {key} | {f['window_s']:.0f} s | {f['settled_s']:.0f} s | {f['off']:+.0%} |"
        for key, f in found.items()
    ]
    return [
        "## The window one step after machines came or went",
        "",
        "| machines | that step | the same step, settled | off |",
        "|---|---|---|---|",
        *rows,
    ]


def _changing(change: Change, at_s: float) -> Trace:
    kept = min(change.before, change.after)
    names = [f"node{i}" for i in range(max(change.before, change.after))]
    events = [TraceEvent(0.0, name, "add") for name in names[: change.before]]
    if change.after > change.before:
        events += [TraceEvent(at_s, name, "add") for name in names[kept:]]
    else:
        events += [TraceEvent(at_s, name, "remove") for name in names[kept:]]
    return Trace("change", "one change in the number of machines", tuple(events), LONG_S)


def main(arguments: list[str]) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {json.loads(line)["change"] for line in lines}
    with options.out.open("a", encoding="utf-8") as out:
        for change in CHANGES:
            if change.key not in known:
                print(json.dumps({"change": change.key, **run(change)}), file=out, flush=True)
                print(change.key, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
