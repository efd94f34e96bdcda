"""Pictures of a simulation, each as SVG and PNG: throughput over time, cost per token, what machines did.

Needs matplotlib, which only `rlboost[plot]` brings; imported when something is drawn. The same comparison
gives the same SVG. Every picture says that it is simulated, and of what.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost_cli.simulation.runs import BASELINE, OURS, Comparison
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.sim import SimResult
from rlboost_runtime.sim.result import RESERVED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "on_demand": "#7f7f7f",
    "recompute": "#E69F00",
    "polyrl": "#56B4E9",
    "paper": "#0072B2",
    "rlboost": "#D55E00",
    "oracle": "#000000",
}
"""Okabe and Ito's palette, told apart by people who see fewer colours."""

ACTIVITIES = {
    "boot": "#d9d9d9",
    "pull": "#F0E442",
    "rollout": "#0072B2",
    "idle": "#f2f2f2",
    "seed": "#56B4E9",
    "hand-over": "#CC79A7",
    "train": "#009E73",
    "wait": "#f2f2f2",
    "optimizer": "#E69F00",
    "publish": "#000000",
    "restart": "#7f7f7f",
}

_STYLE: dict[str, Any] = {  # matplotlib's own settings
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "svg.hashsalt": "rlboost",
    "figure.dpi": 150,
}


def needs_matplotlib() -> None:
    """Raise `ConfigError` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot draws with matplotlib, which is not installed",
            "pip install 'rlboost[plot]', or leave --plot out",
        )


def draw(found: Comparison, folder: Path) -> list[Path]:
    """Write all pictures into `folder`; return the files. Raises `ConfigError` where it cannot."""
    import matplotlib as mpl

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"--plot {folder}: {exc.strerror}", "give a folder that can be written to"
        ) from None
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # their type lists every key
        pictures = {"throughput": _throughput(found), "cost": _cost(found)}
        if machines := _machines(found):
            pictures["machines"] = machines
        return [path for name, figure in pictures.items() for path in _save(figure, folder / name)]


def _save(figure: Figure, path: Path) -> list[Path]:
    files = [path.with_suffix(".svg"), path.with_suffix(".png")]
    try:
        figure.savefig(files[0], metadata={"Date": None})
        figure.savefig(files[1])
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}", "give --plot a folder that can be written to") from None
    return files


def _title(found: Comparison, what: str, seed: int | None = None) -> str:
    wanted = found.wanted
    seeds = f"seed {found.seeds[0]}" if len(found.seeds) == 1 else f"{len(found.seeds)} seeds"
    shown = seeds if seed is None else f"seed {seed}"
    hours = f"hours {wanted.start_h:g} to {wanted.start_h + found.hours:.4g}"
    return f"{what}, simulated\n{wanted.preset.name} on {wanted.whole.name}, {hours}, {shown}"


# --- throughput over time ----------------------------------------------------------------------------------


def _throughput(found: Comparison) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    rates, capacity = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for policy, results in found.results.items():
        _curve(rates, policy, results[0])
    rates.set_title(_title(found, "Throughput of each step", found.seeds[0]), pad=16)
    rates.set_ylabel("tokens per second")
    rates.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    rates.set_ylim(bottom=0)
    rates.grid(axis="y", alpha=0.3)
    _mark_kills(rates, found)
    rates.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    _capacity(capacity, found)
    capacity.set_xlabel("hours since the window's begin")
    return figure


def _curve(axes: Axes, policy: str, result: SimResult) -> None:
    """Draw each step's tokens over its seconds: within a step the rate rises and falls anyway."""
    edges = [row.started_s / 3600 for row in result.rows]
    edges.append((result.rows[-1].started_s + result.rows[-1].seconds) / 3600)
    strong = policy == OURS
    axes.stairs(
        [row.tokens / row.seconds for row in result.rows],
        edges,
        baseline=None,
        color=COLOURS.get(policy),
        linewidth=2.4 if strong else 1.3,
        linestyle="--" if policy in (BASELINE, "oracle") else "-",
        zorder=3 if strong else 2,
        label=policy,
    )


def _mark_kills(axes: Axes, found: Comparison) -> None:
    """Mark the kills of our policy, or of the first one that had any; they hardly differ between policies."""
    shown = next((result for result in _candidates(found) if result.kills), None)
    if shown is None:
        return
    for is_noticed, marker, what in ((False, "v", "kill"), (True, "^", "kill with notice")):
        hours = [kill.at_s / 3600 for kill in shown.kills if kill.was_noticed is is_noticed]
        if hours:
            height = [1.02] * len(hours)
            transform = axes.get_xaxis_transform()
            axes.scatter(
                hours,
                height,
                marker=marker,
                s=22,
                color="#a00000",
                transform=transform,
                clip_on=False,
                label=f"{what} ({shown.policy})",
            )
            axes.vlines(hours, 0, 1, transform=transform, color="#a00000", alpha=0.12, linewidth=0.8)


def _capacity(axes: Axes, found: Comparison) -> None:
    trace = found.wanted.markets[0].trace
    steps = [*trace.capacity_steps, (trace.duration_s, trace.capacity_steps[-1][1])]
    hours, counts = [at_s / 3600 for at_s, _ in steps], [count for _, count in steps]
    axes.fill_between(hours, counts, step="post", color="#bbbbbb", linewidth=0)
    cap = found.wanted.preset.max_spot_instances
    axes.axhline(cap, color="#555555", linewidth=0.8, linestyle=":")
    axes.annotate(f"at most {cap} are used", (hours[-1], cap), ha="right", va="bottom", fontsize=7)
    axes.set_ylabel("nodes")
    axes.set_xlim(0, found.hours)
    axes.set_ylim(0, max(cap, *counts) * 1.15)


# --- cost per token ----------------------------------------------------------------------------------------


def _cost(found: Comparison) -> Figure:
    from matplotlib.figure import Figure

    policies = [policy for policy in found.results if found.measure(policy, "tokens_per_usd").mean > 0]
    estimates = [found.measure(policy, "tokens_per_usd") for policy in policies]
    costs = [1e6 / estimate.mean for estimate in estimates]
    spread = [
        (estimate.half_width or 0.0) / estimate.mean * cost
        for estimate, cost in zip(estimates, costs, strict=True)
    ]
    figure = Figure(figsize=(7, 0.9 + 0.45 * max(2, len(policies))), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        policies,
        costs,
        xerr=spread if any(spread) else None,
        color=[COLOURS.get(policy, "#0072B2") for policy in policies],
        height=0.65,
        capsize=3,
    )
    for index, (policy, cost) in enumerate(zip(policies, costs, strict=True)):
        ratio = found.ratio("tokens_per_usd", policy)
        times = "" if ratio is None or policy == BASELINE else f"   {ratio.mean:.2f} x the tokens per dollar"
        axes.annotate(
            f"${cost:.2f}{times}",
            (cost + spread[index], index),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.invert_yaxis()
    axes.set_xlim(0, max(costs, default=1.0) * 1.55)
    axes.xaxis.set_major_formatter(lambda value, _: f"${value:.2f}")
    axes.set_xlabel("dollars per million trained tokens")
    axes.set_title(_title(found, "Cost"))
    return figure


# --- what machines did -------------------------------------------------------------------------------------


def _machines(found: Comparison) -> Figure | None:
    """Return the first seed's machines under our policy, or the first that has a timeline; None: none has."""
    result = next((result for result in _candidates(found) if result.timeline), None)
    return None if result is None else _gantt(found, result)


def _candidates(found: Comparison) -> list[SimResult]:
    """Return the first seed's result under our policy, or under every policy where ours was left out."""
    shown = [OURS] if OURS in found.results else list(found.results)
    return [found.results[policy][0] for policy in shown]


def _gantt(found: Comparison, result: SimResult) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = _lanes(result)
    num_lanes = max(lanes.values()) + 1
    figure = Figure(figsize=(10, 1.6 + 0.34 * num_lanes), layout="constrained")
    axes = figure.subplots()
    used = [what for what in ACTIVITIES if any(interval.what == what for interval in result.timeline)]
    for what in used:
        bars: dict[int, list[tuple[float, float]]] = {}
        for interval in result.timeline:
            if interval.what == what:
                length = (interval.end_s - interval.start_s) / 3600
                bars.setdefault(lanes[interval.machine], []).append((interval.start_s / 3600, length))
        for lane, spans in bars.items():
            axes.broken_barh(spans, (lane - 0.36, 0.72), facecolors=ACTIVITIES[what], linewidth=0)
    kills = [kill for kill in result.kills if kill.machine in lanes]
    axes.scatter(
        [kill.at_s / 3600 for kill in kills],
        [lanes[kill.machine] for kill in kills],
        marker="x",
        s=26,
        linewidths=1.6,
        color="#a00000",
        zorder=3,
        label="kill",
    )
    axes.set_yticks(range(num_lanes), ["reserved", *(f"spot {lane}" for lane in range(1, num_lanes))])
    axes.invert_yaxis()
    axes.set_xlim(0, found.hours)
    axes.set_xlabel("hours since the window's begin")
    axes.set_title(_title(found, f"Machines under {result.policy}", result.seed))
    names = {"idle": "idle or waiting", "wait": "idle or waiting"}
    handles = {
        names.get(what, what): Patch(color=ACTIVITIES[what], label=names.get(what, what)) for what in used
    }
    axes.legend(
        handles=[*handles.values(), *axes.get_legend_handles_labels()[0]],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    return figure


def _lanes(result: SimResult) -> dict[str, int]:
    """Return each machine's row: the reserved node's is 0, a spot machine takes the first free one."""
    spans: dict[str, tuple[float, float]] = {}
    for interval in result.timeline:
        start_s, end_s = spans.get(interval.machine, (interval.start_s, interval.end_s))
        spans[interval.machine] = (min(start_s, interval.start_s), max(end_s, interval.end_s))
    lanes, free_at = {RESERVED: 0}, list[float]()
    for machine, (start_s, end_s) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        if machine == RESERVED:
            continue
        lane = next((k for k, at_s in enumerate(free_at) if at_s <= start_s), len(free_at))
        free_at[lane : lane + 1] = [end_s]
        lanes[machine] = lane + 1
    return lanes
