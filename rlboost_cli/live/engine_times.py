"""How long engines took to start and new weights to come, in two lines; medians over the instances."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

Json = dict[str, Any]  # an object of design section 6


def engine_times(status: Json) -> list[str]:
    """Return a line on the phases of starts and one on the newest weights, where they are known."""
    instances: Sequence[Json] = status.get("instances") or []
    starts: list[Json] = [instance["start_s"] for instance in instances if instance.get("start_s")]
    loads: list[Json] = [
        {"pull": i.get("pull_s"), "load": i.get("load_s"), "pause": i.get("pause_s")}
        for i in instances
        if i.get("load_s")
    ]
    return [*_line("engine start", starts), *_line("new weights", loads)]


def _line(label: str, found: Sequence[Json]) -> list[str]:
    if not found:
        return []
    names = dict.fromkeys(name for times in found for name in times)
    medians = {name: median(times.get(name) or 0.0 for times in found) for name in names}
    words = ", ".join(f"{name.replace('_', ' ')} {_seconds(took)}" for name, took in medians.items())
    return [f"{label:<12} {words}{f' (median of {len(found)})' if len(found) > 1 else ''}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
