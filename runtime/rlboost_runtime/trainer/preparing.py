"""What the trainer does before its first step, for whoever watches: one small file, replaced as it goes.

Guarantees: writing it never fails the trainer; it is written at most twice a second unless what is being done
changes; it is gone once training goes on.
"""

from __future__ import annotations

import logging
import time

from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder, write_json

WRITE_EVERY_S = 0.5

log = logging.getLogger(__name__)


class Preparing:
    """Says what is being done, and how far it is where that is known."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.preparing
        self._doing = ""
        self._since = 0.0
        self._written_at = 0.0

    def say(self, doing: str, done: float | None = None, of: float | None = None, unit: str = "") -> None:
        """We are `doing` this; `done` of `of` units of it, where `unit` is "B", "s" or what is counted."""
        now = time.time()
        if doing != self._doing:
            self._doing, self._since = doing, now
        elif now - self._written_at < WRITE_EVERY_S:
            return
        self._written_at = now
        try:
            write_json(
                self._path, {"doing": doing, "done": done, "of": of, "unit": unit, "since": self._since}
            )
        except OSError as problem:
            event(log, "preparing.write_failed", problem=str(problem))

    def over(self) -> None:
        """Training goes on from here."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as problem:
            event(log, "preparing.write_failed", problem=str(problem))
