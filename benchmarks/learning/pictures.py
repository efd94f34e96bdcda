"""The curves as pictures: SVG, the same bytes for the same data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning.analysis import by_condition, difference, first, last
from benchmarks.learning.conditions import QUIET, STORMY
from benchmarks.learning.evidence import RunRecord

COLOURS = {QUIET: "#0072b2", STORMY: "#d55e00"}  # told apart by colour-blind readers (Okabe and Ito)
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LABELS = {QUIET: "quiet: machines never die", STORMY: "stormy: machines are killed"}


def draw(records: Sequence[RunRecord], folder: Path) -> list[Path]:
    """Write `curves.svg` and `seeds.svg` into `folder` and return their paths."""
    matplotlib.rcParams |= {"svg.hashsalt": "rlboost", "svg.fonttype": "none", "font.size": 10}
    runs = by_condition(records)
    return [_curves(runs, folder / "curves.svg"), _seeds(runs, folder / "seeds.svg")]


def _curves(runs: dict[str, list[RunRecord]], path: Path) -> Path:
    """Mean reward per step over seeds, with a band of one standard deviation."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for condition, records in runs.items():
        per_step = list(zip(*(record.rewards for record in records), strict=True))
        steps = range(1, len(per_step) + 1)
        mean = [statistics.fmean(values) for values in per_step]
        spread = [statistics.stdev(values) for values in per_step]
        axes.plot(steps, mean, color=COLOURS[condition], label=LABELS[condition], linewidth=1.8)
        axes.fill_between(
            steps,
            [m - s for m, s in zip(mean, spread, strict=True)],
            [m + s for m, s in zip(mean, spread, strict=True)],
            color=COLOURS[condition],
            alpha=0.15,
            linewidth=0,
        )
    kills = sum(record.kills_in_rollout for record in runs[STORMY])
    axes.set_title(
        f"{len(runs[QUIET])} seeds each; {kills} kills inside rollouts (mean, band: ± 1 sd of seeds)"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the step")
    axes.legend(loc="lower right", frameon=False)
    return _save(figure, axes, path)


def _seeds(runs: dict[str, list[RunRecord]], path: Path) -> Path:
    """Last-five mean reward of each seed, quiet against stormy, above where they all began."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    pairs = list(zip(runs[QUIET], runs[STORMY], strict=True))
    for index, (quiet, stormy) in enumerate(pairs):
        axes.plot([index, index], [last(quiet), last(stormy)], color="#999999", linewidth=1, zorder=1)
        for record in (quiet, stormy):
            axes.scatter(
                index, last(record), color=COLOURS[record.condition], zorder=2,
                label=LABELS[record.condition] if index == 0 else None,
            )  # fmt: skip
    found = difference([last(q) for q, _ in pairs], [last(s) for _, s in pairs])
    axes.set_title(f"last five steps: stormy - quiet = {found.mean:+.4f} ± {found.standard_error:.4f} (1 se)")
    axes.set_xticks(range(len(pairs)), [f"seed {quiet.seed}" for quiet, _ in pairs])
    axes.set_ylabel("mean reward")
    start = statistics.fmean(first(record) for pair in pairs for record in pair)
    axes.axhline(start, color="#999999", linestyle="dotted", label="all runs, first five steps")
    axes.set_ylim(bottom=start - 0.02)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return _save(figure, axes, path)


def draw_curves(curves: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Write the mean reward per step of each condition, over its seeds, to `path`."""
    matplotlib.rcParams |= {"svg.hashsalt": "rlboost", "svg.fonttype": "none", "font.size": 10}
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for index, (condition, runs) in enumerate(curves.items()):
        mean = [statistics.fmean(values) for values in zip(*runs, strict=True)]
        axes.plot(
            range(1, len(mean) + 1), mean, label=condition, linewidth=1.6,
            color=OKABE_ITO[index % len(OKABE_ITO)],
        )  # fmt: skip
    axes.set_title(f"mean of {len(next(iter(curves.values())))} seeds")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the step")
    axes.legend(loc="lower right", frameon=False)
    _save(figure, axes, path)


def _save(figure: Figure, axes: Axes, path: Path) -> Path:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    return path
