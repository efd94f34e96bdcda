"""The book of boots: how machines came into service, as `boots.py` writes it; survives a killed process."""

from __future__ import annotations

from collections.abc import Mapping

from rlboost_runtime.coordinator.ledger_file import LedgerFile


class BootBook(LedgerFile):
    """One record per spot machine that has dialled in; the last word holds."""

    def keep_boots(self, boots: Mapping[str, str]) -> None:
        """Keep records by machine: all of them or, on an error, none."""
        with self._transaction(durable=False) as db:
            db.executemany("INSERT OR REPLACE INTO boots (machine, boot) VALUES (?, ?)", list(boots.items()))

    def kept_boots(self) -> dict[str, str]:
        """Return every record by machine."""
        return {str(machine): str(boot) for machine, boot in self._rows("SELECT machine, boot FROM boots")}
