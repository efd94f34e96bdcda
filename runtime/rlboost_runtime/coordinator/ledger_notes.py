"""The book of what happened, in words.

Notes wait in memory for `write_notes`, so that nobody waits for the disk to tell a story.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.coordinator.accounts import Row, to_ns
from rlboost_runtime.coordinator.ledger_file import LedgerFile
from rlboost_runtime.logs import event as log_event

log = logging.getLogger(__name__)

MAX_WAITING_NOTES = 10_000
"""Notes kept in memory while they cannot be written; then the oldest are dropped."""


@dataclass(frozen=True, slots=True)
class BookEvent:
    """Something that happened, in words. `at` in seconds since the Unix epoch."""

    at: float
    kind: str
    text: str
    data: dict[str, object]


class NoteBook(LedgerFile):
    """Things that happened, oldest first."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._notes: deque[tuple[int, str, str, str]] = deque(maxlen=MAX_WAITING_NOTES)
        super().__init__(path, read_only=read_only)

    def close(self) -> None:
        """Write what waits and close the file."""
        self.write_notes()
        super().close()

    def note(self, at: float, kind: str, text: str, **data: object) -> None:
        """Note something that happened; touches no disk: `write_notes` does, now and then.

        `data` must be JSON values and hold no secret.
        """
        with self._lock:
            self._notes.append((to_ns(at), kind, text, json.dumps(data)))

    def write_notes(self) -> None:
        """Write the notes that wait, all at once. Where that fails it is logged and they wait on."""
        with self._lock:
            waiting = list(self._notes)
        if not waiting:
            return
        try:
            with self._transaction(durable=False) as db:
                db.executemany("INSERT INTO events (at, kind, text, data) VALUES (?, ?, ?, ?)", waiting)
        except sqlite3.Error as problem:
            log_event(log, "notes.write_failed", problem=str(problem), waiting=len(waiting))
            return
        with self._lock:
            for note in waiting:
                if self._notes and self._notes[0] is note:  # not dropped meanwhile
                    self._notes.popleft()

    def events(self, last: int | None = None) -> list[BookEvent]:
        """Return what happened, oldest first, also what waits to be written; only the `last` ones where
        given."""
        with self._lock:
            rows: list[Row] = self._db.execute(
                "SELECT at, kind, text, data FROM events ORDER BY id DESC LIMIT ?",
                (-1 if last is None else last,),
            ).fetchall()
            rows = [*reversed(rows), *self._notes]
        return [
            BookEvent(int(at) / 1e9, str(kind), str(text), json.loads(data))
            for at, kind, text, data in (rows if last is None else rows[max(0, len(rows) - last) :])
        ]
