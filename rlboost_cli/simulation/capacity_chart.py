"""A trace's capacity over time as lines of characters: pure, without colour, for any terminal width."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from rlboost_runtime.traces import Trace

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
    for position, text in marks:
        line = line[:position] + text + line[position + len(text) :]
    end = f"{hours:.4g} h"
    return line[: columns - len(end)] + end


def _taken(trace: Trace, columns: int) -> str:
    share_s = trace.duration_s / columns
    taken = Counter(min(columns - 1, int(e.at_s / share_s)) for e in trace.events if e.kind == "remove")
    most = max(taken.values(), default=1)
    return "".join(_EIGHTHS[-(-8 * taken[column] // most)] for column in range(columns)).rstrip()
