"""Trace files into traces. Formats are recognised by content: event rows, count rows, SkyPilot's JSON.

Guarantees: what cannot have happened is refused with `ConfigError`, which names file and line, what was found
and what to do; no other error leaves `load_trace`. The same file always gives the same trace.

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
rows that remove: the warning that came before, in seconds. A count does not identify the nodes that come and
go: they are named in the order in which they come, and those that leave are drawn, always in the same way.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.traces.events import Kind, Trace, TraceEvent


class BadRow(Exception):
    """What is wrong with a row, and what to do about it; the reader adds file and line."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found, remedy)
        self.found, self.remedy = found, remedy


@dataclass(slots=True)
class History:
    """Rows taken so far. Every method that takes one raises `BadRow`."""

    zone: str = ""
    """Of rows that name none."""
    last_s: float = 0.0
    """Time of the last row."""
    _events: list[TraceEvent] = field(default_factory=list)
    _there: dict[str, tuple[TraceEvent, bool]] = field(default_factory=dict)
    """Nodes that are there: their add, and True if their notice is out."""
    _known: set[str] = field(default_factory=set)
    _counted: list[str] = field(default_factory=list)
    """Nodes that are there because of a count."""
    _drawn: random.Random = field(default_factory=lambda: random.Random("count rows"))  # noqa: S311

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """Everything that happened, in order of time: a notice given by its removal comes before it."""
        return tuple(sorted(self._events, key=lambda event: event.at_s))  # stable: ties keep the file's order

    def advance(self, at_s: float) -> None:
        """Go on to `at_s`."""
        if at_s < self.last_s:
            raise BadRow(f"time goes back from {self.last_s:g} to {at_s:g} s", "sort the rows by time")
        self.last_s = at_s

    def take(self, kind: str, node: str, zone: str = "", notice_s: float | None = None) -> None:
        """Take an event of one node."""
        if not node:
            raise BadRow("a row without a node", "name the node")
        if notice_s is not None and kind != "remove":
            raise BadRow(f"a notice_s in a row that says `{kind}`", "give it in rows that remove")
        match kind:
            case "add":
                self._add(node, zone)
            case "notice":
                self._notice(node, zone)
            case "remove":
                self._remove(node, zone, notice_s or 0.0)
            case _:
                raise BadRow(f"unknown kind `{kind}`", "write add, notice or remove")

    def take_count(self, count: int, zone: str = "") -> None:
        """Let nodes come or go until there are `count`."""
        while len(self._counted) < count:
            self._counted.append(f"node{len(self._known) + 1}")
            self._add(self._counted[-1], zone)
        while len(self._counted) > count:
            self._remove(self._counted.pop(self._drawn.randrange(len(self._counted))), zone, 0.0)

    def _add(self, node: str, zone: str) -> None:
        if node in self._there:
            raise BadRow(
                f"`{node}` is added but is there already", "delete the row, or add its removal before"
            )
        self._known.add(node)
        self._there[node] = (self._append(self.last_s, node, "add", zone or self.zone), False)

    def _notice(self, node: str, zone: str) -> None:
        added, is_noticed = self._present(node, "noticed")
        if is_noticed:
            raise BadRow(f"`{node}` is noticed twice", "delete one of the two rows")
        self._there[node] = (added, True)
        self._append(self.last_s, node, "notice", zone or added.zone)

    def _remove(self, node: str, zone: str, notice_s: float) -> None:
        added, is_noticed = self._present(node, "removed")
        if notice_s and is_noticed:
            raise BadRow(f"`{node}` is noticed twice", "leave out its notice_s, or the row of its notice")
        if notice_s:
            noticed_s = max(added.at_s, self.last_s - notice_s)
            self._append(noticed_s, node, "notice", zone or added.zone)
        del self._there[node]
        self._append(self.last_s, node, "remove", zone or added.zone)

    def _present(self, node: str, what: str) -> tuple[TraceEvent, bool]:
        if node in self._there:
            return self._there[node]
        never = "is not there at that time" if node in self._known else "never came"
        raise BadRow(f"`{node}` is {what} but {never}", "add it in an earlier row, or delete this one")

    def _append(self, at_s: float, node: str, kind: Kind, zone: str) -> TraceEvent:
        self._events.append(TraceEvent(at_s, node, kind, zone))
        return self._events[-1]


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
        """True if rows hold numbers of nodes instead of events."""
        return "count" in self.columns

    @property
    def is_from_start(self) -> bool:
        """True if times count from the trace's start."""
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
    """Return True if `text` is a number as people write it."""
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


MAX_BYTES = 64 * 1024 * 1024
"""Longest file that is read: public traces are below 1 MB."""

_HEADER = "at_s,kind,node,zone"
_NOTE = re.compile(r"#\s*(name|source|duration_s)\s*:\s*(.*\S)\s*")


def load_trace(path: Path, *, name: str | None = None, source: str | None = None, zone: str = "") -> Trace:
    """Return the trace in `path`; events without a zone of their own get `zone`. Raises `ConfigError`.

    A JSON series lasts to the end of its last tick, rows to the last row. `#` begins a comment; `# name:`,
    `# source:` and `# duration_s:` are heeded. Prices in a JSON series are not part of a trace.
    """
    lines = _lines(path)
    notes = {found[1]: found[2] for _, line in lines if (found := _NOTE.fullmatch(line.strip()))}
    rows = [(number, line) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not rows:
        raise ConfigError(f"{path}: holds no rows", "give rows such as `0,add,node1`, or another file")
    is_json = rows[0][1].lstrip()[0] in "{["
    history = _read_json(path, lines, zone) if is_json else _read_rows(path, rows, zone)
    duration_s = _duration(path, history, notes)
    return Trace(
        name=name or notes.get("name", path.stem),
        source=source or notes.get("source", str(path)),
        events=history.events,
        duration_s=duration_s,
    )


def trace_rows(trace: Trace) -> Iterator[str]:
    """Return `trace` as the lines of a file from which `load_trace` reads the same trace."""
    yield from (f"# name: {trace.name}", f"# source: {trace.source}", f"# duration_s: {trace.duration_s!r}")
    yield _HEADER
    for event in trace.events:
        yield f"{event.at_s!r},{event.kind},{event.node},{event.zone}"


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the file's lines, numbered from 1."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(
                f"{path}: longer than {MAX_BYTES // 2**20} MiB", "cut it into windows, or thin its rows"
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file", "give a file, or a name from `rlboost traces list`"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not text", "give a CSV or JSON file, unpacked") from None
    except (OSError, ValueError) as exc:  # ValueError: a path with a NUL
        raise ConfigError(f"{path}: cannot be read: {exc}", "give a CSV or JSON file") from None
    return list(enumerate(text.split("\n"), 1))


def _duration(path: Path, history: History, notes: dict[str, str]) -> float:
    try:
        noted_s = number(notes.get("duration_s", "0"), "duration_s")
    except BadRow as bad:
        raise ConfigError(f"{path}: {bad.found}", bad.remedy) from None
    duration_s = max(history.last_s, noted_s)
    if duration_s <= 0:
        raise ConfigError(
            f"{path}: everything happens at one time",
            "give rows of two different times, or its length as `# duration_s: 3600`",
        )
    return duration_s


def _read_rows(path: Path, lines: list[tuple[int, str]], zone: str) -> History:
    history, rows = History(zone), ((line, _cells(path, line, text)) for line, text in lines)
    line, cells = next(rows)
    try:
        layout = layout_of(cells)
        if layout.has_header:
            line, cells = next(rows, (line, []))
            if not cells:
                raise BadRow("holds a header and no rows", "give rows under it, or another file")
        origin_s = 0.0 if layout.is_from_start else clock(layout.read(cells))
        while cells:
            row = layout.read(cells)
            history.advance(clock(row) - origin_s)
            if layout.has_counts:
                history.take_count(whole_count(number(row["count"], "count")), row.get("zone", ""))
            else:
                warned = row.get("notice_s")
                notice_s = number(warned, "notice_s") if warned else None
                history.take(row["kind"], row["node"], row.get("zone", ""), notice_s)
            line, cells = next(rows, (line, []))
    except BadRow as bad:
        raise ConfigError(f"{path}:{line}: {bad.found}", bad.remedy) from None
    return history


def _cells(path: Path, line: int, text: str) -> list[str]:
    try:
        row = next(csv.reader([text], skipinitialspace=True, strict=True))
    except csv.Error as exc:
        raise ConfigError(f"{path}:{line}: {exc}", "write plain cells with commas between them") from None
    return [cell.strip() for cell in row]


def _read_json(path: Path, lines: list[tuple[int, str]], zone: str) -> History:
    """Read `{"metadata": {"gap_seconds": g}, "data": [count, ...]}`: tick k is `k * g` s after the start."""
    text = "\n".join("" if line.lstrip().startswith("#") else line for _, line in lines)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"{path}:{exc.lineno}: not JSON: {exc.msg}", "fetch or write the file again"
        ) from None
    except (RecursionError, ValueError) as exc:  # ValueError: a number of thousands of digits
        raise ConfigError(f"{path}: cannot be used: {exc}", "fetch or write the file again") from None
    try:
        return _ticks(found, zone)
    except _BadTick as bad:
        line = text[: _position(text, bad.index)].count("\n") + 1
        raise ConfigError(f"{path}:{line}: data[{bad.index}]: {bad.found}", bad.remedy) from None
    except BadRow as bad:
        raise ConfigError(f"{path}:{_first_line(text)}: {bad.found}", bad.remedy) from None


def _first_line(text: str) -> int:
    return text[: len(text) - len(text.lstrip())].count("\n") + 1


class _BadTick(BadRow):
    def __init__(self, index: int, bad: BadRow) -> None:
        super().__init__(bad.found, bad.remedy)
        self.index = index


def _ticks(found: object, zone: str) -> History:
    gap_s, counts = _series(found)
    history = History(zone)
    for index, count in enumerate(counts):
        try:
            if isinstance(count, bool) or not isinstance(count, int | float):
                raise BadRow(f"{json.dumps(count)[:40]} is not a number", "write numbers of nodes")
            history.advance(index * gap_s)
            history.take_count(whole_count(number(repr(count), "count")))
        except BadRow as bad:
            raise _BadTick(index, bad) from None
    history.advance(len(counts) * gap_s)
    return history


def _series(found: object) -> tuple[float, list[object]]:
    wanted = 'write {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3]}'
    if not isinstance(found, dict):
        raise BadRow("a JSON list instead of an object", wanted)
    metadata, counts = found.get("metadata"), found.get("data")
    if not isinstance(metadata, dict) or "gap_seconds" not in metadata:
        raise BadRow("metadata.gap_seconds is missing", wanted)
    if not isinstance(counts, list):
        raise BadRow("data is missing or no list", wanted)
    if not counts:
        raise BadRow("data is empty", wanted)
    gap_s = metadata["gap_seconds"]
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s < 1e9:
        raise BadRow(
            f"gap_seconds is {json.dumps(gap_s)[:40]}", "write the seconds from one tick to the next"
        )
    return float(gap_s), counts


def _position(text: str, index: int) -> int:
    """Return where element `index` of `data` stands: everything before it is numbers with commas between."""
    at = text.index("[", text.index('"data"')) + 1
    for _ in range(index):
        at = text.index(",", at) + 1
    return at + len(text[at:]) - len(text[at:].lstrip())
