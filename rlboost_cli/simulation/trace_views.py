"""Traces for a person: the list of known ones, what one looks like, and bringing one here.

A trace's capacity over time as lines of characters: pure, without colour, for any terminal width.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlboost_cli.terminal import output, text
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import home
from rlboost_runtime.traces import PROFILES, Trace, trace_statistics
from rlboost_runtime.traces.catalogue import KNOWN, cached, fetch_trace, known, open_trace

Json = dict[str, Any]  # one object as printed by --json


def known_traces(cache: Path) -> Json:
    """Return the traces that can be named: generated ones, and public ones with whether they are here."""
    return {
        "generated": [
            {
                "name": profile.name,
                "hours": profile.hours,
                "target": profile.target,
                "matched_to": profile.recorded_from,
                "recorded_statistics": dict(profile.recorded),
            }
            for profile in PROFILES.values()
        ],
        "public": [
            {**asdict(trace), "url": trace.url, "fetched": cached(trace, cache) is not None}
            for trace in KNOWN.values()
        ],
    }


def print_known(data: Json) -> None:
    """Print what `known_traces` returned."""
    output.show("generated: made from a seed, always here")
    output.table(
        ("trace", "hours", "nodes", "like"),
        [(g["name"], g["hours"], f"up to {g['target']}", g["matched_to"]) for g in data["generated"]],
    )
    output.show("\npublic: recorded, fetched from their origin by `rlboost traces fetch TRACE`")
    output.table(
        ("trace", "hours", "mean", "max", "taken", "bytes", "licence", "here"),
        [_public_row(trace) for trace in data["public"]],
    )
    output.show("")
    origins: dict[tuple[str, str], list[str]] = {}
    for trace in data["public"]:
        origins.setdefault((trace["repository"], trace["what"]), []).append(trace["name"])
    for (repository, what), names in origins.items():
        output.show(f"{', '.join(names)}:\n  {what}; github.com/{repository}")


def _public_row(trace: Json) -> tuple[object, ...]:
    return (
        trace["name"],
        trace["hours"],
        f"{trace['mean_capacity']:.1f}",
        trace["max_capacity"],
        trace["removes"],
        f"{trace['size_bytes']:,}",
        trace["licence"],
        "yes" if trace["fetched"] else "no",
    )


def fetch(name: str, cache: Path, origin: str | None) -> Path:
    """Fetch a public trace, saying so; return its file."""
    trace = known(name)
    if here := cached(trace, cache):
        output.progress(f"{name} is here already")
        return here
    output.progress(
        f"fetching {name}, {trace.size_bytes:,} bytes, licence {trace.licence}, from {origin or trace.url}"
    )
    last_said = time.monotonic()

    def say(received: int, total: int) -> None:
        nonlocal last_said
        if time.monotonic() - last_said > 2:
            output.progress(f"  {received:,} of {total:,} bytes")
            last_said = time.monotonic()

    return fetch_trace(trace, cache, url=origin, progress=say)


def described(trace: Trace) -> Json:
    """Return a trace's description for a program."""
    steps = [list(step) for step in trace.capacity_steps]
    return {
        "name": trace.name,
        "source": trace.source,
        "statistics": asdict(trace_statistics(trace)),
        "capacity_steps": steps,
    }


def description_lines(trace: Trace) -> list[str]:
    """Return a trace's statistics and its capacity over time."""
    s = trace_statistics(trace)
    zones = f" in {s.zones} zones" if s.zones > 1 else ""
    lines = [
        trace.name,
        f"  from      {trace.source}",
        f"  length    {s.hours:.2f} h",
        f"  capacity  mean {s.mean_capacity:.1f} nodes, {s.min_capacity} to {s.max_capacity}{zones}",
        f"  came      {s.adds} ({s.nodes} different nodes)",
        f"  taken     {s.removes}, {s.notices} with notice",
    ]
    if s.removes:
        taken = f"{s.mean_removes_per_tick:.1f} nodes on average, {s.max_removes_per_tick} at most"
        lines += [
            f"  reclaims  {s.remove_ticks_per_hour:.2f} per hour, of {taken}",
            f"            {s.mass_share or 0:.0%} of what was taken went two or more at once",
            f"  lifetime  mean {_time(s.mean_lifetime_s)}, median {_time(s.median_lifetime_s)} of ended ones",
        ]
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    return [*lines, "", "nodes", *capacity_chart(trace, width)]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else text.duration(seconds)


_EIGHTHS = " ▁▂▃▄▅▆▇█"


def capacity_chart(trace: Trace, width: int = 72, height: int = 8) -> list[str]:
    """Return bars of the mean number of nodes, an axis in hours, and under it where nodes were taken."""
    columns = max(16, width - 6)
    top = max(1, *(count for _, count in trace.capacity_steps))
    means = _means(trace, columns)
    lines = [
        f"{_label(top, row, height):>4} ┤{_row(means, top, row, height)}" for row in reversed(range(height))
    ]
    lines.append("   0 ┼" + "─" * columns)
    lines.append("      " + _hours(trace.duration_s / 3600, columns))
    return [*lines, "taken " + _taken(trace, columns)]


def _means(trace: Trace, columns: int) -> list[float]:
    """Return the mean capacity of each column's share of the time."""
    share_s = trace.duration_s / columns
    node_s = [0.0] * columns
    steps = [*trace.capacity_steps, (trace.duration_s, 0)]
    for (from_s, count), (until_s, _) in pairwise(steps):
        for column in range(int(from_s / share_s), min(columns, int(until_s / share_s) + 1)):
            overlap_s = min(until_s, (column + 1) * share_s) - max(from_s, column * share_s)
            node_s[column] += count * max(0.0, overlap_s)
    return [value / share_s for value in node_s]


def _row(means: list[float], top: int, row: int, height: int) -> str:
    filled = (round((mean / top * height - row) * 8) for mean in means)
    return "".join(_EIGHTHS[min(8, max(0, eighths))] for eighths in filled)


def _label(top: int, row: int, height: int) -> str:
    return f"{top * (row + 1) / height:.0f}" if (row + 1) % (height // 2) == 0 else ""


def _hours(hours: float, columns: int) -> str:
    marks = [
        (position, f"{hours * position / columns:.3g}") for position in range(0, columns - 8, columns // 4)
    ]
    line = " " * columns
    for position, mark in marks:
        line = line[:position] + mark + line[position + len(mark) :]
    end = f"{hours:.4g} h"
    return line[: columns - len(end)] + end


def _taken(trace: Trace, columns: int) -> str:
    share_s = trace.duration_s / columns
    taken = Counter(min(columns - 1, int(e.at_s / share_s)) for e in trace.events if e.kind == "remove")
    most = max(taken.values(), default=1)
    return "".join(_EIGHTHS[-(-8 * taken[column] // most)] for column in range(columns)).rstrip()


def trace_of(named: str, window: str | None, seed: int) -> Trace:
    """Return the trace `named`, cut to the hours in `window`. Raises `ConfigError`."""
    trace = open_trace(named, home() / "traces", seed=seed)
    return trace if window is None else cut(trace, window)


def cut(trace: Trace, window: str) -> Trace:
    """Return the hours `A:B` of `trace`; either may be left out. Raises `ConfigError`."""
    length_h = trace.duration_s / 3600
    start, separator, end = window.partition(":")
    try:
        start_h, end_h = float(start or 0), float(end or length_h)
        if not separator:
            raise ValueError
        return trace.window(start_h * 3600, min(end_h * 3600, trace.duration_s) if not end else end_h * 3600)
    except ValueError:
        raise ConfigError(
            f"--window {window} is no part of {trace.name}, which lasts {length_h:.2f} h",
            f"write hours from its start as A:B, such as 0:{min(2.0, length_h):.4g}",
        ) from None
