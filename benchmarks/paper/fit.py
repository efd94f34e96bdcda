"""Fits the calibration to the three fitted figures by random draws, and writes every draw down.

    python -m benchmarks.paper.fit --draws 40 --seed 0 --out FILE [--single-responses]

The ranges are judgements made before the first draw. The loss is the sum of squared relative errors of the
fitted figures; predicted ones are not computed here.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from benchmarks.paper.published import figure
from benchmarks.paper.static import run_static, settled
from rlboost_runtime.sim import Preset, presets
from rlboost_runtime.sim.presets import PAPER_CALIBRATION, Calibration

RANGES = {
    "decode_bandwidth_share": (0.60, 0.85),
    "decode_step_s": (0.001, 0.006),
    "train_mfu": (0.42, 0.62),
    "micro_batch_s": (0.05, 0.6),
    "growth_headroom_tokens": (600.0, 3_000.0),
}
FITTED = ("8b base tokens/s", "14b n=1 throughput", "14b n=6 throughput")


def in_mode(preset: Preset, calibration: Calibration, *, groups: bool) -> Preset:
    """Return the preset with these parameters and micro-batches of whole groups, else of single responses."""
    assumptions = replace(preset.assumptions, trains_whole_groups=groups)
    return replace(preset, calibration=calibration, assumptions=assumptions)


def fitted_figures(calibration: Calibration, seed: int = 0, *, groups: bool = True) -> dict[str, float]:
    """Return what the model gives for the fitted figures."""
    known = {name: in_mode(preset, calibration, groups=groups) for name, preset in presets().items()}
    base_8b = _base(known["paper-8b"], seed)
    base_14b = _base(known["paper-14b"], seed)
    one, six = (settled(run_static(known["paper-14b"], n, "paper", seed=seed)).tokens_per_s for n in (1, 6))
    return dict(zip(FITTED, (base_8b, one / base_14b, six / base_14b), strict=True))


def loss(found: dict[str, float]) -> float:
    """Return the sum of squared relative errors."""
    return sum((value / figure(name).value - 1.0) ** 2 for name, value in found.items())


def draw(random: Random, centre: Calibration | None, width: float) -> Calibration:
    """Return a draw from the ranges, or near a centre: within `width` of each range around it."""
    values: dict[str, float] = {}
    for name, (low, high) in RANGES.items():
        if centre is None:
            values[name] = random.uniform(low, high)
            continue
        spread = width * (high - low)
        middle = float(getattr(centre, name))
        values[name] = min(high, max(low, middle + random.uniform(-spread, spread)))
    return Calibration(**{**values, "growth_headroom_tokens": round(values["growth_headroom_tokens"])})  # type: ignore[arg-type]


def _base(preset: Preset, seed: int) -> float:
    rows = run_static(preset, 0, "on_demand", steps=3, seed=seed).rows
    return sum(row.tokens for row in rows) / sum(row.seconds for row in rows)


def main(arguments: list[str]) -> int:
    """Draw, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single-responses", action="store_true", help="else micro-batches of whole groups")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    random, best, best_loss = Random(options.seed), PAPER_CALIBRATION, float("inf")
    with options.out.open("a", encoding="utf-8") as out:
        for number in range(options.draws):
            explores = number and number < options.draws / 3
            tried = draw(random, None if explores else best, 0.25) if number else PAPER_CALIBRATION
            found = fitted_figures(tried, groups=not options.single_responses)
            error = loss(found)
            line = {"calibration": asdict(tried), "figures": found, "loss": error}
            print(json.dumps(line), file=out, flush=True)
            if error < best_loss:
                best, best_loss = tried, error
            print(f"{number + 1}/{options.draws} best loss {best_loss:.4f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
