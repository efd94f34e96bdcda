"""What moving weights cost: bytes that machines received, at the prices they were bought with.

Guarantees: a transfer is billed once, however often it is told, also by the next coordinator; what a machine
owes is exact to the micro-dollar over all its transfers. What comes from a bucket is taken to cost what it
costs from the head: the job says no other price. Peers are in the machine's own zone and cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlboost_runtime.coordinator.accounts import UsageKind, to_ns
from rlboost_runtime.coordinator.ledger_file import LedgerFile

GB = 10**9
PEERS = "peers"


@dataclass(frozen=True, slots=True)
class Route:
    """All that was billed from `source` ("head", "bucket") to the machines of `zone`."""

    source: str
    zone: str
    num_bytes: int
    micro_usd: int


class EgressBook(LedgerFile):
    """Transfers and their prices."""

    def set_egress_price(self, machine: str, micro_usd_per_gb: int) -> None:
        """Note what a gigabyte from the head to `machine` costs; the first word holds."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO egress_prices (machine, micro_usd_per_gb) VALUES (?, ?)"
                " ON CONFLICT (machine) DO NOTHING",
                (machine, micro_usd_per_gb),
            )

    def zone_of(self, machine: str) -> str:
        """Return where a machine is, as PROVIDER/ZONE; empty where it is not known."""
        rows = self._rows("SELECT provider, zone FROM machines WHERE machine = ?", (machine,))
        return f"{rows[0][0]}/{rows[0][1]}" if rows else ""

    def add_egress(self, transfer: str, machine: str, source: str, num_bytes: int, at: float) -> int:
        """Bill bytes that came to `machine` from "head", "bucket" or "peers"; return the micro-dollars.

        `transfer`: names this one among all of the run.
        """
        rows = self._rows("SELECT micro_usd_per_gb FROM egress_prices WHERE machine = ?", (machine,))
        price = int(rows[0][0]) if rows else 0
        if source == PEERS or price == 0 or num_bytes == 0:
            return 0
        zone = self.zone_of(machine)
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM egress WHERE transfer = ?", (transfer,)).fetchone() is not None:
                return 0
            moved, billed = db.execute(
                "SELECT coalesce(sum(num_bytes), 0), coalesce(sum(micro_usd), 0) FROM egress"
                " WHERE machine = ?",
                (machine,),
            ).fetchone()
            due = (int(moved) + num_bytes) * price // GB - int(billed)
            db.execute(
                "INSERT INTO egress (transfer, machine, source, zone, num_bytes, micro_usd)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (transfer, machine, source, zone, num_bytes, due),
            )
            if due:
                basis = f"weights, {source} -> {zone}: {num_bytes} bytes at ${price / 1e6:g} per GB"
                db.execute(
                    "INSERT INTO usage (at, kind, micro_usd, basis) VALUES (?, ?, ?, ?)",
                    (to_ns(at), UsageKind.EGRESS, due, basis),
                )
        return due

    def egress_routes(self) -> list[Route]:
        """Return what was billed, by where from and where to, the dearest first."""
        rows = self._rows(
            "SELECT source, zone, sum(num_bytes), sum(micro_usd) FROM egress"
            " GROUP BY source, zone ORDER BY sum(micro_usd) DESC, source, zone"
        )
        return [Route(str(s), str(z), int(num), int(cost)) for s, z, num, cost in rows]
