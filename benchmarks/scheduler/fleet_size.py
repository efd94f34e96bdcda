"""Is the fleet that `rlboost` chooses the one with the cheapest tokens? Against brute force, simulated.

    python -m benchmarks.scheduler.fleet_size --out fleet_size.jsonl

For each setting of prices, response limit and egress, constant fleets of every size are simulated with the
fleet's size fixed; then `rlboost` chooses for itself, beginning with the largest. One line of JSON per
setting: what it chose, what brute force says, and how much dearer a token is. What is there already is not
run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.paper.static import constant_trace
from rlboost_runtime.sim import Preset, presets, simulate
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.result import StepRow

MOST = 8
WORKLOAD = Workload(prompts=64)
"""Half of the paper's step: half the time to simulate."""
STEPS = 8
UNSETTLED_STEPS = 4
CHOOSING_STEPS = 12
"""Machines are ended only after three steps in a row agree."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a choice depends on."""

    preset: str
    limit: int
    """Response tokens at most."""
    spot_usd_per_hour: float
    egress_usd_per_gb: float

    @property
    def key(self) -> str:
        """Name in the file of results."""
        spot, egress = f"${self.spot_usd_per_hour:g}/h", f"${self.egress_usd_per_gb:g}/GB"
        return f"{self.preset}, at most {self.limit} tokens, spot {spot}, egress {egress}"


SETTINGS = (
    Setting("paper-14b", 14_336, 5.32, 0.0),
    Setting("paper-14b", 14_336, 15.0, 0.0),
    Setting("paper-14b", 14_336, 5.32, 0.02),
    Setting("paper-14b", 14_336, 5.32, 0.09),
    Setting("paper-14b", 5_120, 5.32, 0.0),
    Setting("paper-14b", 5_120, 21.0, 0.0),
    Setting("paper-8b", 14_336, 10.0, 0.0),
    Setting("paper-8b", 14_336, 5.32, 0.05),
)
"""The settings on which the rule was made."""
UNSEEN = (Setting("paper-14b", 8_192, 8.0, 0.01), Setting("paper-32b", 14_336, 30.0, 0.0))
"""First run when the rule was settled."""


def of(setting: Setting) -> Preset:
    """Return the preset of a setting."""
    known = presets()[setting.preset]
    spot = replace(known.spot[0], usd_per_hour=setting.spot_usd_per_hour)
    work = replace(WORKLOAD, max_response_tokens=setting.limit)
    return replace(
        known,
        spot=(spot,),
        workload=work,
        egress_usd_per_gb=setting.egress_usd_per_gb,
        max_spot_instances=MOST,
    )


def costs(setting: Setting) -> dict[int, float]:
    """Return the dollars per million tokens with each number of machines, by simulating it."""
    preset = of(setting)
    pulled_usd = preset.model.weight_bytes / 1e9 * setting.egress_usd_per_gb
    found = {}
    for machines in range(1, MOST + 1):
        rows = _rows(setting.preset, setting.limit, machines)
        seconds, tokens = sum(row.seconds for row in rows), sum(row.tokens for row in rows)
        per_hour = preset.reserved_usd_per_hour + machines * setting.spot_usd_per_hour
        usd = per_hour * seconds / 3_600.0 + machines * pulled_usd * len(rows)
        found[machines] = 1e6 * usd / tokens
    return found


def chosen(setting: Setting) -> int:
    """Return the number of machines that `rlboost` settles on by itself."""
    result = simulate(
        of(setting), constant_trace(MOST), "rlboost", seed=0, hours=1e3, max_steps=CHOOSING_STEPS
    )
    return round(result.rows[-1].spot_instances)


def run(setting: Setting) -> dict[str, object]:
    """Choose, and hold the choice against brute force."""
    by_size, choice = costs(setting), chosen(setting)
    best = min(by_size, key=lambda size: by_size[size])
    return {
        "setting": setting.key,
        "chosen": choice,
        "best": best,
        "dearer": round(by_size[choice] / by_size[best] - 1.0, 4),
        "usd_per_million_tokens": {size: round(usd, 3) for size, usd in by_size.items()},
    }


@cache
def _rows(preset: str, limit: int, machines: int) -> tuple[StepRow, ...]:
    """Return the settled steps with so many machines; prices play no part in them."""
    known = presets()[preset]
    fixed = replace(known, workload=replace(WORKLOAD, max_response_tokens=limit), max_spot_instances=machines)
    free = replace(fixed, spot=(replace(fixed.spot[0], usd_per_hour=0.0),))
    result = simulate(free, constant_trace(machines), "rlboost", seed=0, hours=1e3, max_steps=STEPS)
    return result.rows[UNSETTLED_STEPS:]


def as_markdown(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a section of the report."""
    if not found:
        return ["The chosen fleet has not been held against brute force."]
    unseen = {setting.key for setting in UNSEEN}
    rows = [
        f"| {key}{', unseen' if key in unseen else ''} | {f['chosen']} | {f['best']} | {f['dearer']:+.1%} |"
        for key, f in found.items()
    ]
    return [
        "## Fleet size: chosen against brute force",
        "",
        "| setting | chosen | cheapest | dearer than the cheapest |",
        "|---|---|---|---|",
        *rows,
    ]


def main(arguments: list[str]) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    options = parser.parse_args(arguments)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {json.loads(line)["setting"] for line in lines}
    with options.out.open("a", encoding="utf-8") as out:
        for setting in (*SETTINGS, *UNSEEN):
            if setting.key not in known and options.only in setting.key:
                print(json.dumps(run(setting)), file=out, flush=True)
                print(setting.key, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
