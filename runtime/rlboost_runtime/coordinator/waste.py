"""Billed time that made nothing: machines that boot or idle, metered once a second, kept in the ledger."""

from __future__ import annotations

from collections import defaultdict

from rlboost_runtime.coordinator.ledger import Ledger, WasteKind
from rlboost_runtime.coordinator.state import State

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
        """Charge the time since the last call to each machine's state now."""
        elapsed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        core = state.core
        for machine in core.machines.values():
            if not machine.is_launched:
                continue
            instances = [i for i in core.instances.values() if i.machine == machine.machine and i.is_alive]
            if not any(i.has_served for i in instances):
                self._seconds[WasteKind.BOOT, machine.machine] += elapsed
            elif not any(i.num_assigned for i in instances):
                self._seconds[WasteKind.IDLE, machine.machine] += elapsed
        if now - self._written_at >= WRITE_EVERY_S:
            self._written_at = now
            for (kind, name), seconds in self._seconds.items():
                self._ledger.add_waste(kind, name, seconds)
            self._seconds.clear()
