"""Billed time that made nothing: machines that boot or idle, metered once a second, kept in the ledger."""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict

from rlboost_runtime.coordinator.ledger import Ledger, WasteKind
from rlboost_runtime.coordinator.state import State
from rlboost_runtime.logs import event as log_event

log = logging.getLogger(__name__)

WRITE_EVERY_S = 5.0
"""Metered seconds reach the ledger in batches: each write is a commit."""


class WasteMeter:
    """Adds up machine-seconds; call `meter` about once a second."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._at: float | None = None
        self._written_at = 0.0
        self._seconds: dict[tuple[WasteKind, str], float] = defaultdict(float)

    def meter(self, state: State, now: float) -> None:
        """Charge the time since the last call to each billed machine's state now."""
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        core = state.core
        for name in self._ledger.running_machines() & core.machines.keys():
            instances = [i for i in core.instances.values() if i.machine == name]
            if not any(i.has_served for i in instances):  # one that served and is lost has still booted
                self._seconds[WasteKind.BOOT, name] += elapsed
            elif not any(i.num_assigned for i in instances if i.is_alive):
                self._seconds[WasteKind.IDLE, name] += elapsed
        if now - self._written_at >= WRITE_EVERY_S:
            self._written_at = now
            self.flush()

    def flush(self) -> None:
        """Write what was metered. Where that fails it is logged, and written the next time."""
        if not self._seconds:
            return
        try:
            self._ledger.add_wastes(self._seconds)
        except sqlite3.Error as problem:
            log_event(log, "waste.write_failed", problem=str(problem))
            return
        self._seconds.clear()
