"""The curve as a picture: SVG, the same bytes for the same data.

python -m benchmarks.ettr.picture ettr_2core_2026-11-28.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = {"paper-8b": "#0072b2", "paper-14b": "#d55e00", "paper-32b": "#009e73"}
"""Told apart by people who see fewer colours (Okabe and Ito)."""

Curve = list[tuple[float, float]]
"""(Failures per step, ETTR)."""


def curve(rows: list[dict[str, Any]], mode: str, name: str, key: str = "tokens_per_s") -> Curve:
    """Return a curve of `key`, over its value without failures, in the order of failures."""
    found = {row["failures_per_step"]: row[key] for row in rows if (row["mode"], row["name"]) == (mode, name)}
    return [(share, found[share] / found[0.0]) for share in sorted(found)] if 0.0 in found else []


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the picture of all curves."""
    matplotlib.rcParams |= {"svg.hashsalt": "rlboost", "svg.fonttype": "none", "font.size": 10}
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, colour in COLOURS.items():
        label = name.removeprefix("paper-").upper()
        for mode, style in (("simulated", "-"), ("live", "o--")):
            if points := curve(rows, mode, name):
                what = "simulated" if mode == "simulated" else "live, steps a fifth as long"
                axes.plot(*zip(*points, strict=True), style, color=colour, label=f"{label}, {what}")
        if points := curve(rows, "simulated", name, "computed_ettr_of_starting_over"):
            label = f"{label}, starting over (computed)"
            axes.plot(*zip(*points, strict=True), ":", color=colour, label=label)
    axes.set_xlabel("failures per step")
    axes.set_ylabel("ETTR")
    axes.set_ylim(0.75, 1.01)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    data = Path(sys.argv[1])
    draw([json.loads(line) for line in data.read_text().splitlines()], data.with_name("ettr.svg"))
