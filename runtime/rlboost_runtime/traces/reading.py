"""Trace files into traces. Formats are recognised by content: event rows, count rows, SkyPilot's JSON.

Guarantees: what cannot have happened is refused with `ConfigError`, which names file and line, what was found
and what to do; no other error leaves `load_trace`. The same file always gives the same trace.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.traces.events import Trace
from rlboost_runtime.traces.rows import BadRow, History, clock, layout_of, number, whole_count

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
            f"{path}:{exc.lineno}: not JSON: {exc.msg}", "fetch or write the file anew"
        ) from None
    except (RecursionError, ValueError) as exc:  # ValueError: a number of thousands of digits
        raise ConfigError(f"{path}: cannot be used: {exc}", "fetch or write the file anew") from None
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
