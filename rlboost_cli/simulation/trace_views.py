"""Traces for a person: the list of known ones, what one looks like, and bringing one here."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlboost_cli.simulation.capacity_chart import capacity_chart
from rlboost_cli.terminal import output, text
from rlboost_runtime.traces import PROFILES, Trace, trace_statistics
from rlboost_runtime.traces.fetch import cached, fetch_trace
from rlboost_runtime.traces.known import KNOWN, known

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
        taken = f"{s.mean_removes_per_tick:.1f} nodes in the mean, {s.max_removes_per_tick} at most"
        lines += [
            f"  reclaims  {s.remove_ticks_per_hour:.2f} per hour, of {taken}",
            f"            {s.mass_share or 0:.0%} of what was taken went two or more at once",
            f"  lifetime  mean {_time(s.mean_lifetime_s)}, median {_time(s.median_lifetime_s)} of ended ones",
        ]
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    return [*lines, "", "nodes", *capacity_chart(trace, width)]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else text.duration(seconds)
