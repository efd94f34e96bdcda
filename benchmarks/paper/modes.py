"""Which assumption predicts the paper better: micro-batches of whole groups, or of single responses?

    python -m benchmarks.paper.modes --fits FOLDER --trace FILE --out modes.json

Each assumption is fitted by itself, to the same three figures (`fit`, whose draws are read from
`groups.jsonl` and `responses.jsonl` of the folder). Then it predicts the others: constant fleets, and the
three models on windows of the trace. Everything is simulated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.paper.fit import in_mode
from benchmarks.paper.predict import SHORT_LIMIT
from benchmarks.paper.published import figure
from benchmarks.paper.static import run_static, settled
from benchmarks.paper.windows import LENGTH_SEED, NODE_SHARE, WINDOW_S, windows_of
from rlboost_runtime.sim import Preset, presets, simulate
from rlboost_runtime.sim.presets import Calibration
from rlboost_runtime.traces import Trace, load_trace, sample_nodes

WINDOWS = (0, 2, 4)
SAMPLE_SEED = 0
MODES = ("groups", "responses")


def best_draw(path: Path) -> dict[str, Any]:
    """Return the draw with the smallest loss."""
    draws: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return min(draws, key=lambda draw: float(draw["loss"]))


def predictions(known: dict[str, Preset], trace: Trace) -> dict[str, float]:
    """Return the predicted figures under the paper's policy, by their names in `published`."""
    found: dict[str, float] = {}
    for machines in (1, 2, 3, 4):
        step = settled(run_static(known["paper-8b"], machines, "paper"))
        found[f"8b n={machines} tokens/s"] = step.tokens_per_s
    workload = replace(known["paper-14b"].workload, max_response_tokens=SHORT_LIMIT)
    short = replace(known["paper-14b"], workload=workload)
    base, three = run_static(short, 0, "on_demand", steps=3), settled(run_static(short, 3, "paper"))
    found["14b 5K n=3 throughput"] = three.tokens_per_s / base.tokens_per_s
    found["14b 5K n=3 tokens per dollar"] = three.tokens_per_usd / base.tokens_per_usd
    for model in ("8b", "14b", "32b"):
        found |= _on_trace(model, known[f"paper-{model}"], trace)
    return found


def _on_trace(model: str, preset: Preset, trace: Trace) -> dict[str, float]:
    base = run_static(preset, 0, "on_demand", steps=3)
    windows = [windows_of(trace)[i] for i in WINDOWS]
    sampled = sample_nodes(trace, NODE_SHARE, SAMPLE_SEED)
    runs = [
        simulate(preset, sampled.window(*w), "paper", seed=LENGTH_SEED, hours=WINDOW_S / 3_600.0)
        for w in windows
    ]
    return {
        f"{model} trace throughput": sum(r.tokens_per_s for r in runs) / len(runs) / base.tokens_per_s,
        f"{model} trace tokens per dollar": sum(r.tokens_per_usd for r in runs)
        / len(runs)
        / base.tokens_per_usd,
    }


def main(arguments: list[str]) -> int:
    """Predict in both modes; write the figures and their errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fits", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for mode in MODES:
        best = best_draw(options.fits / f"{mode}.jsonl")
        calibration = Calibration(**best["calibration"])
        known = {name: in_mode(p, calibration, groups=mode == MODES[0]) for name, p in presets().items()}
        values = predictions(known, load_trace(options.trace))
        errors = {name: value / figure(name).value - 1.0 for name, value in values.items()}
        found[mode] = {
            "calibration": asdict(calibration),
            "fitted": best["figures"],
            "fit_loss": best["loss"],
            "predicted": values,
            "errors": errors,
            "root_mean_square_error": math.sqrt(sum(e * e for e in errors.values()) / len(errors)),
            "largest_error": max(map(abs, errors.values())),
        }
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for mode in MODES:
        print(
            f"{mode}: rms {found[mode]['root_mean_square_error']:.3f}, fit loss {found[mode]['fit_loss']:.4f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
