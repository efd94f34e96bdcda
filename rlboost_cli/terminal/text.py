"""Tables, figures and the list of runs as text for a person: pure, without colour."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlboost_runtime.billing.launch_records import MachineRecord

ENDED = ("done", "failed", "stopped")

Json = dict[str, Any]  # an object of design section 6: which keys are there depends on who wrote it


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned table: numbers to the right, None as a dash."""
    cells = [list(headers), *([dash(value) for value in row] for row in rows)]
    columns = range(len(headers))
    widths = [max(len(row[i]) for row in cells) for i in columns]
    is_right = [len(cells) > 1 and all(is_number(row[i]) for row in cells[1:]) for i in columns]
    return "\n".join(
        "  ".join(
            row[i].rjust(widths[i]) if is_right[i] else row[i].ljust(widths[i]) for i in columns
        ).rstrip()
        for row in cells
    )


def wrapped(rows: Sequence[tuple[str, str]], columns: int) -> list[tuple[str, str]]:
    """Return rows of a name and a sentence whose table has lines of at most `columns`, broken between
    words."""
    left = max(30, columns - max((len(name) for name, _ in rows), default=0) - 2)
    return [
        ("" if index else name, line)
        for name, sentence in rows
        for index, line in enumerate(textwrap.wrap(sentence, left, break_on_hyphens=False))
    ]


def dash(value: object) -> str:
    """Return the text of a value; a dash where there is none."""
    return "-" if value is None else str(value)


def is_number(text: str) -> bool:
    """Return True if a cell is a figure, dollars or a dash, so that its column is set to the right."""
    return text.lstrip("$-").replace(",", "").replace(".", "").isdigit() or text == "-"


def counted(number: int, noun: str) -> str:
    """Return `1 machine`, `2 machines`, `1,024 machines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tilde(path: Path) -> str:
    """Return a path as a person types it: `~` for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def labelled(label: str, *words: str) -> list[str]:
    """Return lines of a summary, one for each of `words`; the first has a label before it."""
    return [f"{'' if number else label:<9}{line}".rstrip() for number, line in enumerate(words)]


def usd(value: float | None, places: int = 2) -> str:
    """Return dollars."""
    return "-" if value is None else f"${value:,.{places}f}"


def usd_parts(total: float, parts: Sequence[float], places: int = 2) -> list[str]:
    """Return the dollars of `parts`, rounded so that what is shown adds up to the `total` shown.

    `parts` add up to `total` and are not negative; the largest remainders are rounded up.
    """
    unit = 10**places
    exact = [part * unit for part in parts]
    shown = [math.floor(each + 1e-6) for each in exact]
    missing = max(0, round(float(f"{total:.{places}f}") * unit) - sum(shown))
    for at in sorted(range(len(parts)), key=lambda i: shown[i] - exact[i])[:missing]:
        shown[at] += 1
    return [usd(each / unit, places) for each in shown]


def duration(seconds: float) -> str:
    """Return a length of time in its handiest unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def left_lines(machines: Iterable[MachineRecord]) -> list[str]:
    """Return a line per machine that may still cost money: what it is, where, and its hourly price."""
    return [
        f"{each.machine}  {each.accelerator} in {each.provider} {each.zone},"
        f" {usd(each.all_micro_usd_per_hour / 1e6, 2)} per hour"
        for each in machines
    ]


# --- runs ---------------------------------------------------------------------------------


def runs_table(rows: Sequence[Json]) -> str:
    """Return the list of runs."""
    return table(("run", "state", "step", "reward", "spent", "started"), (_run(row) for row in rows))


def _run(row: Json) -> tuple[object, ...]:
    lives = row["running"] or row["state"] in ENDED
    state = row["state"] + ("" if lives else " (not running)")
    answered = row.get("requests_answered")
    step = f"{row['step']}/{dash(row['steps'])}" if answered is None else f"{answered:,} answered"
    at = row.get("started_at")
    started = None if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    return row["run"], state, step, _figure(row["reward_mean"]), usd(row["spent_usd"], 2), started


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def against_on_demand(alone: float | None, saving: float | None, basis: str) -> str:
    """Return what a million tokens cost in the steps, and would cost there on demand only; empty where that
    is not known. `alone`: dollars on demand only; `saving`: the share of that which was saved.

    A run's start-up and end are in neither figure.
    """
    if alone is None or saving is None:
        return ""
    ours, how = usd(alone * (1 - saving), 2), re.split(r"[,:;]", basis)[0]
    words = f"{saving:.0%} saved" if saving >= 0 else f"{-saving:.0%} more"
    return f"{ours} in steps, {usd(alone, 2)} on demand ({how}): {words}"
