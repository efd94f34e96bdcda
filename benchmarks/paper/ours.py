"""What each part of `rlboost` brings: fleets with one part turned off, and with dear hand-overs.

    python -m benchmarks.paper.ours --out ours.jsonl

One line of JSON per case is appended; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper.compare import GROUP_PARTS
from benchmarks.paper.found import Case
from benchmarks.paper.static import run_static, settled
from benchmarks.paper.windows import WINDOW_S
from rlboost_runtime.sim import Preset, Switches, presets, simulate
from rlboost_runtime.sim.presets import GPUS
from rlboost_runtime.traces import sample_nodes
from rlboost_runtime.traces.generate import PROFILES, generate_trace

MIXED = "L40S"
"""GPU of every other spot machine in a mixed fleet: about a third of an H100's arithmetic, a quarter of its
memory's speed."""
MIXED_USD_PER_HOUR = 2.0
HALF_OTHER = f"half {MIXED}"
CHURN = "churn"
"""Two hours of a generated market (`generated-p3`, seed 0) instead of machines that stay."""
CHURN_SHARE = 0.25
"""Of that market's nodes: about as many are left as are wanted."""
FLEETS = (
    ("paper-8b", 4, ""),
    ("paper-14b", 1, ""),
    ("paper-14b", 6, ""),
    ("paper-14b", 6, HALF_OTHER),
    ("paper-14b", 6, CHURN),
    ("paper-32b", 3, ""),
)
"""Preset, machines, and what is unlike machines of one make that stay."""
PARTS = ("prediction", "gate", "evening", "fair_fill", "least_first", *GROUP_PARTS)
DEAR_PART = "gate"
"""The part that is also turned off where hand-overs are dear: it is there for these."""
DEAR_S = (10.0, 30.0)
"""Seconds that waking the reserved engines takes, and sending them to sleep."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One run."""

    preset: str
    machines: int
    policy: str
    kind: str = ""
    """What is unlike machines of one make that stay."""
    without: str = ""
    """The part that is turned off."""
    toggle_s: float | None = None
    """Seconds of waking, and of going to sleep; None: the preset's."""

    @property
    def key(self) -> str:
        """Name in the file of results."""
        toggle = "" if self.toggle_s is None else f", hand-over {self.toggle_s:g} s each way"
        without = f", no {self.without}" if self.without else ""
        kind = f", {self.kind}" if self.kind else ""
        return f"{self.preset} n={self.machines}{kind} {self.policy}{without}{toggle}"


def variants() -> Iterator[Variant]:
    """Yield all runs."""
    for preset, machines, kind in FLEETS:
        yield Variant(preset, machines, "paper", kind)
        yield Variant(preset, machines, "rlboost", kind)
        for part in PARTS:
            yield Variant(preset, machines, "rlboost", kind, without=part)
        for seconds in DEAR_S:
            yield Variant(preset, machines, "paper", kind, toggle_s=seconds)
            yield Variant(preset, machines, "rlboost", kind, toggle_s=seconds)
            yield Variant(preset, machines, "rlboost", kind, without=DEAR_PART, toggle_s=seconds)


def run(variant: Variant) -> dict[str, float]:
    """Simulate one."""
    known = presets()[variant.preset]
    if variant.toggle_s is not None:
        known = _dear(known, variant.toggle_s)
    switches = Switches(**{variant.without: False}) if variant.without else Switches()
    if variant.kind == CHURN:
        return _in_churn(known, variant, switches)
    if variant.kind == HALF_OTHER:
        other = replace(known.spot[0], gpu=GPUS[MIXED], usd_per_hour=MIXED_USD_PER_HOUR)
        known = replace(known, spot=(*known.spot, other))
    found = settled(run_static(known, variant.machines, variant.policy, switches=switches))
    return {"tokens_per_s": found.tokens_per_s, "wait_s": found.wait_s}


def _in_churn(known: Preset, variant: Variant, switches: Switches) -> dict[str, float]:
    market = sample_nodes(generate_trace(PROFILES["generated-p3"], 0), CHURN_SHARE, 0)
    found = simulate(
        replace(known, max_spot_instances=variant.machines),
        market.window(0.0, WINDOW_S),
        variant.policy,
        seed=0,
        hours=WINDOW_S / 3_600.0,
        switches=switches,
    )
    wait_s = sum(row.wait_s for row in found.rows) / len(found.rows)
    return {"tokens_per_s": found.tokens_per_s, "wait_s": wait_s, "preemptions": found.preemptions}


def as_markdown(cases: dict[str, Case]) -> list[str]:
    """Return a section of the report."""
    if not cases:
        return ["What each part of `rlboost` brings has not been run."]
    lines = ["## What each part of rlboost brings", ""]
    lines += ["Machines that stay, but for the column that says churn.", ""]
    names = [f"{preset[6:]} n={n}{f', {kind}' if kind else ''}" for preset, n, kind in FLEETS]
    lines += [f"| tokens/s over rlboost's | {' | '.join(names)} |", "|---" * (len(FLEETS) + 1) + "|"]
    lines.append(_row("the paper's policy", cases, Variant("", 0, "paper")))
    lines += [
        _row(f"rlboost without {part}", cases, Variant("", 0, "rlboost", without=part)) for part in PARTS
    ]
    for seconds in DEAR_S:
        dear = f"hand-overs of {seconds:g} s each way"
        gateless = Variant("", 0, "rlboost", without=DEAR_PART, toggle_s=seconds)
        lines.append(_row(f"the paper's policy, {dear}", cases, Variant("", 0, "paper", toggle_s=seconds)))
        lines.append(_row(f"rlboost without {DEAR_PART}, {dear}", cases, gateless))
    return lines


def _row(name: str, cases: dict[str, Case], like: Variant) -> str:
    cells = []
    for preset, machines, kind in FLEETS:
        this = cases.get(replace(like, preset=preset, machines=machines, kind=kind).key)
        ours = cases.get(Variant(preset, machines, "rlboost", kind, toggle_s=like.toggle_s).key)
        cells.append(
            "" if not this or not ours else f"{this['tokens_per_s'] / ours['tokens_per_s'] - 1:+.1%}"
        )
    return f"| {name} | {' | '.join(cells)} |"


def _dear(known: Preset, seconds: float) -> Preset:
    return replace(known, assumptions=replace(known.assumptions, wake_s=seconds, sleep_s=seconds))


def main(arguments: list[str]) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args(arguments)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {json.loads(line)["case"] for line in lines}
    todo = [variant for variant in variants() if options.only in variant.key]
    with options.out.open("a", encoding="utf-8") as out:
        for number, variant in enumerate(todo):
            if variant.key in known:
                continue
            began = time.process_time()
            found = run(variant)
            line = {"case": variant.key, **found, "cpu_s": round(time.process_time() - began, 2)}
            print(json.dumps(line), file=out, flush=True)
            print(f"{number + 1}/{len(todo)} {variant.key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
