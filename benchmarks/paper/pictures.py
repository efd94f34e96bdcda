"""The report's pictures, as SVG: simulated against published, `rlboost` against `paper`, and an event's cost.

The same figures give the same file. Every picture says that it is simulated.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks.paper import compare
from benchmarks.paper.found import Case, Found
from benchmarks.paper.published import FIGURES

BLUE, ORANGE = "#0072B2", "#D55E00"


def draw(found: dict[str, Found | None], runs: dict[str, Case], sizes: list[Case], out: Path) -> list[Path]:
    """Draw what there is; return the files. None without matplotlib (`pip install 'rlboost[plot]'`)."""
    if find_spec("matplotlib") is None:
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "rlboost", "font.size": 9, "axes.titlelocation": "left"})
    drawn = [_against_published(found, out / "predictions.svg")]
    if compare.comparisons(runs):
        drawn.append(_against_paper(runs, out / "rlboost_over_paper.svg"))
    if sizes:
        drawn.append(_growth(sizes, out / "cost_of_an_event.svg"))
    return drawn


def _growth(sizes: list[Case], path: Path) -> Path:
    from matplotlib import pyplot as plt

    rows = sorted(sizes, key=lambda row: row["machines"])
    machines = [row["machines"] for row in rows]
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    axes.plot(machines, [row["us_per_event"] for row in rows], "o-", color=BLUE, label="microseconds")
    calls = [(row["machines"], row["calls_per_event"]) for row in rows if "calls_per_event" in row]
    axes.plot(*zip(*calls, strict=True), "s-", color=ORANGE, label="Python calls")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("machines, 100 responses each")
    axes.set_ylabel("per event")
    axes.set_title("Core.handle, without heartbeats")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _against_published(found: dict[str, Found | None], path: Path) -> Path:
    from matplotlib import pyplot as plt

    known = [(f, value) for f in FIGURES if (value := found.get(f.name)) is not None]
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(known) + 1.2), layout="constrained")
    errors = [value.value / f.value - 1.0 for f, value in known]
    colours = [ORANGE if f.role == "predicted" else "#999999" for f, _ in known]
    axes.barh(range(len(known)), [100 * error for error in errors], color=colours)
    axes.set_yticks(range(len(known)), [f"{f.name} ({f.role})" for f, _ in known])
    axes.invert_yaxis()
    for limit in (-15, -10, 10, 15):
        axes.axvline(limit, color="#cccccc", linewidth=0.7, zorder=0)
    axes.axvline(0, color="black", linewidth=0.7)
    axes.set_xlabel("error, per cent of the published figure")
    axes.set_title("Simulated against published; nothing ran on a GPU")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _against_paper(runs: dict[str, Case], path: Path) -> Path:
    from matplotlib import pyplot as plt

    found = compare.comparisons(runs)
    figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
    places = range(len(found))
    axes.bar([p - 0.2 for p in places], [c.tokens_per_s for c in found], 0.4, label="tokens/s", color=BLUE)
    axes.bar(
        [p + 0.2 for p in places],
        [c.tokens_per_usd for c in found],
        0.4,
        label="tokens per dollar",
        color=ORANGE,
    )
    axes.set_xticks(list(places), [f"{c.model}, {c.runs} windows" for c in found])
    axes.axhline(1.0, color="black", linewidth=0.7)
    axes.set_ylim(bottom=0.8)
    axes.set_ylabel("rlboost / paper")
    axes.set_title("Simulated, the same windows and seeds")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
