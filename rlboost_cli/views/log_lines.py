"""Log lines for a person: of all files in the order of time, each as when, who and what.

`19:00:23 trainer  step 9 trained  reward 0.339`. Steps count from 1, as everywhere on the screen; in the
files they count from 0. A line that is not ours (a library's warning) stays below the line before it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HIDDEN = ("at", "level", "role", "run", "event", "traceback", "step")
_LOUD = ("warning", "error", "critical")
_NO_TIME = " " * len("19:00:23")
_MACHINES = "machines/"


@dataclass(slots=True)
class LogLines:
    """Turns what is new in log files into lines; remembers the time that each file has reached."""

    root: Path
    _reached: dict[Path, float] = field(default_factory=dict)
    _width: int = 0

    def of(self, parts: Iterable[tuple[Path, str]]) -> list[str]:
        """Return the lines of pieces of files, merged: the oldest first."""
        found: list[tuple[float, str, str]] = []
        for path, text in parts:
            name = _name(path, self.root)
            self._width = max(self._width, len(name))
            entries = [(_entry(line), line) for line in text.splitlines()]
            first = next((entry["at"] for entry, _ in entries if entry is not None), 0.0)
            at = self._reached.get(path, first)
            for entry, line in entries:
                at = at if entry is None else entry["at"]
                clock = _NO_TIME if entry is None else time.strftime("%H:%M:%S", time.localtime(at))
                words = [line] if entry is None else _words(entry)
                found += [(at, f"{each_clock} {name}", each) for each_clock, each in _clocked(clock, words)]
            self._reached[path] = at
        found.sort(key=lambda each: each[0])
        width = len(_NO_TIME) + 1 + self._width
        return [f"{who:<{width}}  {what}".rstrip() for _, who, what in found]


def _clocked(clock: str, words: list[str]) -> list[tuple[str, str]]:
    return [(clock if number == 0 else _NO_TIME, each) for number, each in enumerate(words)]


def _name(path: Path, root: Path) -> str:
    """Return what a line's file is called: trainer, or spot-1/agent-0."""
    return path.relative_to(root).with_suffix("").as_posix().removeprefix(_MACHINES)


def _entry(line: str) -> dict[str, Any] | None:
    """Return a line of ours as an object; None for any other."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and isinstance(found.get("at"), int | float) and "event" in found
    return found if is_ours else None


def _words(entry: dict[str, Any]) -> list[str]:
    event = str(entry["event"])
    words = event.replace(".", " ").replace("_", " ") if _is_name(event) else event
    step = entry.get("step")
    if isinstance(step, int | float):
        number = f"step {int(step) + 1}"
        words = words.replace("step", number, 1) if event.startswith("step.") else f"{words}  {number}"
    level = f"{entry['level']}: " if entry.get("level") in _LOUD else ""
    shown = (
        entry | {"after_step": entry["after_step"] + 1} if isinstance(entry.get("after_step"), int) else entry
    )
    fields = [
        f"{name.replace('_', ' ')} {_value(value)}" for name, value in shown.items() if name not in _HIDDEN
    ]
    traceback = str(entry.get("traceback") or "").splitlines()
    return ["  ".join([level + words, *fields]), *(f"  {line}" for line in traceback)]


def _is_name(event: str) -> bool:
    return " " not in event and "." in event


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, str):
        return " ".join(value.split())
    return json.dumps(value)
