"""What may follow what in a trace: takes rows in the order of the file and refuses what cannot have happened.

A count does not say which nodes come and go: they are named in the order in which they come, and those that
leave are drawn, in the same way every time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rlboost_runtime.traces.events import Kind, TraceEvent


class BadRow(Exception):
    """What is wrong with a row, and what to do about it; whoever knows file and line says where."""

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
    """Nodes that are there: their add, and whether their notice is out."""
    _known: set[str] = field(default_factory=set)
    _counted: list[str] = field(default_factory=list)
    """Nodes that are there because a count said so."""
    _drawn: random.Random = field(default_factory=lambda: random.Random("count rows"))  # noqa: S311

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """Everything that happened, in order of time: a notice told by its removal comes before it."""
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
