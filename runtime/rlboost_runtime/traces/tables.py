"""Traces as rows: what may stand in a line, and what a file's columns mean.

Columns come from a header, or from the shape of the first row:

==========================  =============================================================
first row                   columns
==========================  =============================================================
``0,add,node1``             `time_ms,kind,node[,notice_s]`, as recorded by Bamboo (arXiv 2204.12013)
``21529,4``                 `time_s,count`
``2021-12-11, 11:11:30,55`` `date,time,count`
``at_s,kind,node,zone``     a header: any names of `COLUMNS`, in any order
==========================  =============================================================

`at_s` counts from the trace's start; every other clock counts from the file's first row. `notice_s` stands in
rows that remove: the warning that came before, in seconds.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime

from rlboost_runtime.traces.history import BadRow

CLOCKS = {"at_s": 1.0, "time_s": 1.0, "seconds": 1.0, "time_ms": 1e-3}
"""Columns that hold a time, with their unit in seconds."""

COLUMNS = (*CLOCKS, "date", "time", "kind", "node", "zone", "notice_s", "count")

MAX_COUNT = 100_000
"""Most nodes at once: a count above it is a mistake, and would only fill the memory."""

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a file; the last `num_optional` may be missing in a row."""

    columns: tuple[str, ...]
    has_header: bool = False
    num_optional: int = 0

    @property
    def has_counts(self) -> bool:
        """Whether rows hold numbers of nodes instead of events."""
        return "count" in self.columns

    @property
    def is_from_start(self) -> bool:
        """Whether times count from the trace's start."""
        return "at_s" in self.columns

    def read(self, cells: list[str]) -> dict[str, str]:
        """Return the cells by column. Raises `BadRow`."""
        needed = len(self.columns) - self.num_optional
        if not needed <= len(cells) <= len(self.columns):
            raise BadRow(
                f"{len(cells)} columns: `{','.join(cells)}`", f"write {','.join(self.columns)} in every row"
            )
        return dict(zip(self.columns, cells, strict=False))


def layout_of(cells: list[str]) -> Layout:
    """Return the layout that a file's first row shows. Raises `BadRow`."""
    if not (is_number(cells[0]) or _DATE.fullmatch(cells[0])):
        return _from_header(cells)
    shape = (len(cells), is_number(cells[1])) if len(cells) > 1 else (1, False)
    match shape:
        case 2, True:
            return Layout(("time_s", "count"))
        case 3 | 4, False if not _DATE.fullmatch(cells[0]):
            return Layout(("time_ms", "kind", "node", "notice_s"), num_optional=1)
        case 3, False:
            return Layout(("date", "time", "count"))
    raise BadRow(
        f"`{','.join(cells)}` is no known kind of row",
        "write time_ms,add|remove,node or seconds,count or date,time,count, or a header with any of "
        + ", ".join(COLUMNS),
    )


def is_number(text: str) -> bool:
    """Whether `text` is a number as people write it."""
    return _NUMBER.fullmatch(text) is not None


def number(text: str, what: str) -> float:
    """Return a finite number of 0 or more. Raises `BadRow`."""
    value = float(text) if is_number(text) else math.nan
    if not math.isfinite(value):
        raise BadRow(f"{what} `{text}` is not a number", f"write {what} as a number")
    if value < 0:
        raise BadRow(f"{what} {text} is negative", f"write a {what} of 0 or more")
    return value


def whole_count(value: float) -> int:
    """Return a number of nodes. Raises `BadRow`."""
    if value != int(value):
        raise BadRow(f"count {value:g} is not a whole number", "write whole numbers of nodes")
    if value > MAX_COUNT:
        raise BadRow(f"count {value:g} is more than {MAX_COUNT:,} nodes", "check the columns and their units")
    return int(value)


def clock(row: dict[str, str]) -> float:
    """Return a row's time in seconds on the file's own clock. Raises `BadRow`."""
    for name, unit_s in CLOCKS.items():
        if name in row:
            return number(row[name], name) * unit_s
    text = f"{row['date']} {row['time']}"
    try:
        return (datetime.fromisoformat(text).replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
    except ValueError:
        raise BadRow(f"`{text}` is not a date and a time", "write them as 2021-12-11,11:11:30") from None


def _from_header(names: list[str]) -> Layout:
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise BadRow(
            f"unknown column `{unknown[0]}`", "leave it out, or name it one of " + ", ".join(COLUMNS)
        )
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadRow(f"column `{twice[0]}` stands twice", "leave one of them out")
    clocks = [name for name in names if name in CLOCKS] + ["date"] * ({"date", "time"} <= set(names))
    if len(clocks) != 1:
        raise BadRow(f"{len(clocks)} columns of time", "give one of " + ", ".join((*CLOCKS, "date and time")))
    has_events = {"kind", "node"} <= set(names)
    if has_events == ("count" in names):
        raise BadRow(
            "neither events nor counts" if not has_events else "both events and counts",
            "give the columns kind and node, or the column count",
        )
    return Layout(tuple(names), has_header=True)
