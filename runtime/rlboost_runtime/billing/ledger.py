"""The run's books in one file: machines and money, boots, steps, and what happened in words.

One SQLite file (WAL). The coordinator writes it; anyone may read it while it runs and afterwards. `rlboost
down` writes the last ends of machines once no coordinator is left.

Guarantees:

- a call that records a machine's life, a step or money has committed to stable storage when it returns: an
  intent is on disk before its launch is asked for. Waste and boots survive a killed process, not a power cut;
  notes wait in memory for `write_notes`;
- money and time are integers (micro-dollars, nanoseconds since the Unix epoch), summed exactly;
- recording the same fact about a machine twice changes nothing: the first record holds;
- nothing is removed. A machine stays open (`open_machines`) from its intent until it failed or ended.

Times are given in seconds since the Unix epoch and kept to the microsecond. Safe to use from several threads.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlboost_runtime.billing.accounts import (
    Account,
    BilledState,
    MachineBill,
    Spending,
    UsageKind,
    WasteKind,
    to_ns,
    to_seconds,
)
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger_file import EgressLedger, NoteLedger, StepLedger
from rlboost_runtime.errors import NotFound
from rlboost_runtime.run.reserved import RESERVED_MACHINE

_MACHINES = """
SELECT machine, provider, zone, accelerator, price_micro_usd_per_hour, price_source, intended_at, launched_at,
    ended_at, detail, pool, state
FROM machines WHERE {which}
"""
_OPEN_STATES = (BilledState.INTENDED, BilledState.RUNNING)
_OPEN, _CLOSED = "state IN ('intended', 'running')", "state IN ('failed', 'gone')"

_FIRST_HOLDS = "INSERT INTO {} VALUES (:machine, {}) ON CONFLICT (machine) DO NOTHING"
_USAGE = "SELECT at, kind, micro_usd FROM usage"
_NO_USAGE = f"{_USAGE} WHERE false"


class Ledger(StepLedger, NoteLedger, EgressLedger):
    """All books of a run in `path`, created where they do not exist."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """With `read_only` nothing is created or changed. Raises `NotFound` where there is nothing to read,
        and `RuntimeFault` where the file is not a ledger of this version."""
        self._closed: tuple[int, list[Account]] | None = None
        """Machines that failed or are gone, as of a version of the data that other connections change."""
        super().__init__(path, read_only=read_only)
        self._ended = [
            str(row[0]) for row in self._rows("SELECT machine FROM machines WHERE ended_at NOT NULL")
        ]

    def ended_since(self, mark: int) -> tuple[list[str], int]:
        """Return the machines that ended or failed since `mark`, 0 for all, and the mark to go on from. Reads
        no file; what other connections write is not seen."""
        return self._ended[mark:], len(self._ended)

    def intend(self, record: MachineRecord) -> None:
        """Note that a machine is about to be launched. Launch only after this has returned."""
        if record.price_micro_usd_per_hour < 0:
            raise ValueError(f"price of {record.machine} is negative: {record.price_micro_usd_per_hour}")
        row = asdict(record) | {"intended_at": to_ns(record.intended_at), "state": BilledState.INTENDED}
        with self._billing() as db:
            db.execute(
                "INSERT INTO machines (machine, pool, provider, zone, accelerator, price_micro_usd_per_hour,"
                " price_source, intended_at, state) VALUES (:machine, :pool, :provider, :zone, :accelerator,"
                " :price_micro_usd_per_hour, :price_source, :intended_at, :state)"
                " ON CONFLICT (machine) DO NOTHING",
                row,
            )
            if record.storage_micro_usd_per_hour:
                db.execute(_FIRST_HOLDS.format("storage_prices", ":storage_micro_usd_per_hour"), row)
            if record.min_billed_s is not None:
                db.execute(_FIRST_HOLDS.format("billing_minimums", ":min_billed_s"), row)

    def launched(self, machine: str, at: float) -> None:
        """Note that the provider accepted the launch at `at`: billing starts.

        Also right for a machine whose launch seemed to have failed, or that has ended since: what counts is
        that the provider reported it as started. A launch later than the known end begins another billed
        interval (the reserved machine of a run that is continued). Raises `NotFound` without an intent.
        """
        with self._billing() as db:
            _must_know(db, machine)
            _begin_another_life(db, machine, to_ns(at))
            db.execute(
                "UPDATE machines SET launched_at = min(?, coalesce(ended_at, ?))"
                " WHERE machine = ? AND launched_at IS NULL AND state = ?",
                (to_ns(at), to_ns(at), machine, BilledState.GONE),
            )
            db.execute(
                "UPDATE machines SET launched_at = ?, ended_at = NULL, state = ?"
                " WHERE machine = ? AND launched_at IS NULL",
                (to_ns(at), BilledState.RUNNING, machine),
            )

    def placed(self, machine: str, zone: str, price_micro_usd_per_hour: int | None) -> None:
        """Note where the cloud put a machine, and at what price, before `launched`.

        Changes nothing once it is billed.
        """
        with self._billing() as db:
            _must_know(db, machine)
            db.execute(
                "UPDATE machines SET zone = ?,"
                " price_micro_usd_per_hour = coalesce(?, price_micro_usd_per_hour)"
                " WHERE machine = ? AND launched_at IS NULL",
                (zone, price_micro_usd_per_hour, machine),
            )

    def repriced(self, machine: str, price_micro_usd_per_hour: int, at: float) -> None:
        """Note that the hourly price of a running machine changed at `at`.

        What it was billed before is left as it is: prices change one after another, whatever the clock says.
        """
        if price_micro_usd_per_hour < 0:
            raise ValueError(f"price of {machine} is negative: {price_micro_usd_per_hour}")
        with self._billing() as db:
            _must_know(db, machine)
            which = (machine, BilledState.RUNNING, price_micro_usd_per_hour)
            db.execute(
                "INSERT INTO former_prices SELECT machine, max(?, coalesce("
                "(SELECT max(until) FROM former_prices f WHERE f.machine = machines.machine), 0)),"
                " price_micro_usd_per_hour FROM machines"
                " WHERE machine = ? AND state = ? AND price_micro_usd_per_hour != ?",
                (to_ns(at), *which),
            )
            db.execute(
                "UPDATE machines SET price_micro_usd_per_hour = ?"
                " WHERE machine = ? AND state = ? AND price_micro_usd_per_hour != ?",
                (price_micro_usd_per_hour, *which),
            )

    def failed(self, machine: str, at: float, problem: str) -> None:
        """Note that the launch did not happen. A machine that was launched already is left as it is."""
        with self._billing() as db:
            _must_know(db, machine)
            changed = db.execute(
                "UPDATE machines SET state = ?, ended_at = ?, detail = ? WHERE machine = ? AND state = ?",
                (BilledState.FAILED, to_ns(at), problem, machine, BilledState.INTENDED),
            )
        self._ended += [machine] * changed.rowcount

    def ended(self, machine: str, at: float, detail: str = "") -> None:
        """Note that the provider reports the machine gone since `at`: billing stops."""
        with self._billing() as db:
            _must_know(db, machine)
            changed = db.execute(
                "UPDATE machines SET state = ?, ended_at = max(?, coalesce(launched_at, ?)), detail = ?"
                " WHERE machine = ? AND state IN (?, ?)",
                (BilledState.GONE, to_ns(at), to_ns(at), detail, machine, *_OPEN_STATES),
            )
        self._ended += [machine] * changed.rowcount

    def prolonged(self, machine: str, until: float) -> None:
        """Note that a machine that was taken to be gone existed, and was billed, until `until`.

        Never shortens a bill; changes nothing of a machine that is open.
        """
        with self._billing() as db:
            _must_know(db, machine)
            db.execute(
                "UPDATE machines SET ended_at = max(ended_at, ?)"
                " WHERE machine = ? AND state = ? AND launched_at IS NOT NULL",
                (to_ns(until), machine, BilledState.GONE),
            )

    def stayed(self, machine: str, intended_at: float) -> None:
        """Note that a machine that was taken to be gone exists, and was billed throughout.

        Changes nothing where the machine of that name is not the one that was intended at `intended_at`.
        """
        with self._billing() as db:
            db.execute(
                "UPDATE machines SET ended_at = NULL, state = ?"
                " WHERE machine = ? AND intended_at = ? AND state = ? AND launched_at IS NOT NULL",
                (BilledState.RUNNING, machine, to_ns(intended_at), BilledState.GONE),
            )

    def open_machines(self) -> list[str]:
        """Return the machines that are not known to be gone, oldest intent first."""
        rows = self._rows(
            "SELECT machine FROM machines WHERE state IN (?, ?) ORDER BY intended_at, machine",
            _OPEN_STATES,
        )
        return [str(row[0]) for row in rows]

    def clouds(self) -> set[str]:
        """Return the providers at which a machine beside the head was ever about to be launched."""
        rows = self._rows("SELECT DISTINCT provider FROM machines WHERE machine != ?", (RESERVED_MACHINE,))
        return {str(row[0]) for row in rows}

    def running_machines(self) -> set[str]:
        """Return the machines that are being billed."""
        return set(self.running_prices())

    def running_prices(self) -> dict[str, int]:
        """Return the hourly price of each machine that is being billed, in micro-dollars."""
        rows = self._rows(
            "SELECT machine, price_micro_usd_per_hour FROM machines WHERE state = ?",
            (BilledState.RUNNING,),
        )
        return {str(machine): int(price) for machine, price in rows}

    def unbilled_machines(self) -> set[str]:
        """Return the machines without a recorded launch: not yet launched, failed, or not reported."""
        return {str(row[0]) for row in self._rows("SELECT machine FROM machines WHERE launched_at IS NULL")}

    def last_end(self) -> float | None:
        """Return when the last machine ended that did, or None."""
        (row,) = self._rows("SELECT max(ended_at) FROM machines")
        return None if row[0] is None else int(row[0]) / 1e9

    def machines(self, now: float) -> list[MachineBill]:
        """Return all machines, oldest intent first, billed up to `now`."""
        return self._purchases().machines(now)

    def spending(self) -> Spending:
        """Return all purchases until now, from one read, for many questions."""
        return self._purchases(_USAGE)

    # --- money -------------------------------------------------------------------------------------------

    def total_micro_usd(self, now: float) -> int:
        """Return everything spent up to `now`: machine time and other usage. Never falls as `now` grows."""
        (row,) = self._rows("SELECT coalesce(sum(micro_usd), 0) FROM usage WHERE at <= ?", (to_ns(now),))
        return self._purchases().total_micro_usd(now) + int(row[0])

    def rate_micro_usd_per_hour(self) -> int:
        """Return what an hour costs with the machines that are running or asked for now."""
        return self._purchases().rate_micro_usd_per_hour()

    def add_wastes(self, seconds: Mapping[tuple[WasteKind, str], float]) -> None:
        """Add seconds of wasted billed time, by kind and machine: all of them or, on an error, none.

        Raises `NotFound` for an unknown machine.
        """
        with self._transaction(durable=False) as db:
            for (kind, machine), wasted_s in seconds.items():
                if wasted_s < 0:
                    raise ValueError(f"wasted time of {machine} is negative: {wasted_s}")
                _must_know(db, machine)
                db.execute(
                    "INSERT INTO waste (machine, kind, wasted_ns) VALUES (?, ?, ?)"
                    " ON CONFLICT (machine, kind) DO UPDATE SET wasted_ns = wasted_ns + excluded.wasted_ns",
                    (machine, WasteKind(kind), to_ns(wasted_s)),
                )

    def wasted_ns(self) -> dict[str, dict[WasteKind, int]]:
        """Return nanoseconds of wasted time per machine and kind, where there are any."""
        wasted: dict[str, dict[WasteKind, int]] = {}
        for machine, kind, wasted_ns in self._rows("SELECT machine, kind, wasted_ns FROM waste"):
            wasted.setdefault(str(machine), {})[WasteKind(kind)] = int(wasted_ns)
        return wasted

    # --- requests outside a step -------------------------------------------------------------------------

    def note_served(self, requests: int, tokens: int) -> None:
        """Note how many requests of clients were answered since the run began, and with how many tokens."""
        if (requests, tokens) == self.served():
            return
        with self._transaction(durable=False) as db:
            db.execute(
                "INSERT OR REPLACE INTO served (id, requests, tokens) VALUES (0, ?, ?)", (requests, tokens)
            )

    def served(self) -> tuple[int, int]:
        """Return (requests, tokens) as noted last."""
        rows = self._rows("SELECT requests, tokens FROM served") if self._has("served") else []
        return (int(rows[0][0]), int(rows[0][1])) if rows else (0, 0)

    # --- boots -------------------------------------------------------------------------------------------

    def keep_boots(self, boot_times: Mapping[str, str]) -> None:
        """Keep records by machine: all of them or, on an error, none."""
        with self._transaction(durable=False) as db:
            db.executemany(
                "INSERT OR REPLACE INTO boots (machine, boot) VALUES (?, ?)", list(boot_times.items())
            )

    def kept_boots(self) -> dict[str, str]:
        """Return every record by machine."""
        return {str(machine): str(boot) for machine, boot in self._rows("SELECT machine, boot FROM boots")}

    # --- helpers ------------------------------------------------------------------------------------------

    @contextmanager
    def _billing(self) -> Iterator[sqlite3.Connection]:
        """Change something that bills come from."""
        with self._transaction() as db:
            self._closed = None
            yield db

    def _accounts(self, which: str) -> list[Account]:
        earlier: dict[str, list[tuple[int, int]]] = {}
        for machine, start, end in self._db.execute(
            "SELECT machine, launched_at, ended_at FROM lives ORDER BY rowid"
        ):
            earlier.setdefault(machine, []).append((start, end))
        former: dict[str, list[tuple[int, int]]] = {}
        if self._has("former_prices"):
            for machine, until, price in self._db.execute(
                "SELECT machine, until, price_micro_usd_per_hour FROM former_prices ORDER BY rowid"
            ):
                former.setdefault(machine, []).append((until, price))
        storage = self._by_machine("storage_prices", "micro_usd_per_hour")
        minimums = self._by_machine("billing_minimums", "min_billed_s")
        cursor = self._db.execute(_MACHINES.format(which=which))
        names = [column[0] for column in cursor.description]
        accounts = []
        for row in cursor.fetchall():
            columns = dict(zip(names, row, strict=True))
            state, machine = BilledState(columns.pop("state")), columns["machine"]
            record = _record(columns, storage.get(machine, 0), minimums.get(machine))
            accounts.append(Account(record, state, earlier.get(machine, ()), former.get(machine, ())))
        return accounts

    def _by_machine(self, table: str, column: str) -> dict[str, int]:
        """Return a column by machine; empty where the file lacks the table."""
        if not self._has(table):
            return {}
        return dict(self._db.execute(f"SELECT machine, {column} FROM {table}").fetchall())  # noqa: S608

    def _purchases(self, usage: str = _NO_USAGE) -> Spending:
        """Return what was bought as of one moment; rows of closed machines are read once."""
        with self._snapshot():
            version = int(self._db.execute("PRAGMA data_version").fetchone()[0])
            if self._closed is None or self._closed[0] != version:
                self._closed = version, self._accounts(_CLOSED)
            accounts = [*self._closed[1], *self._accounts(_OPEN)]
            rows = self._db.execute(usage).fetchall()
        accounts.sort(key=lambda account: (account.record.intended_at, account.record.machine))
        return Spending(
            tuple(accounts), tuple((int(at), UsageKind(kind), int(amount)) for at, kind, amount in rows)
        )


def _record(columns: dict[str, Any], storage: int, min_billed_s: int | None) -> MachineRecord:
    """Return a row of the table of machines as a record."""
    for name in ("intended_at", "launched_at", "ended_at"):
        columns[name] = None if columns[name] is None else to_seconds(columns[name])
    return MachineRecord(**columns, storage_micro_usd_per_hour=storage, min_billed_s=min_billed_s)


def _must_know(db: sqlite3.Connection, machine: str) -> None:
    if db.execute("SELECT 1 FROM machines WHERE machine = ?", (machine,)).fetchone() is None:
        raise NotFound(f"the ledger has no machine {machine}", "an intent is written before each launch")


def _begin_another_life(db: sqlite3.Connection, machine: str, at_ns: int) -> None:
    """Where `machine` had been billed and ended before `at_ns`, file that interval and forget it here."""
    again = "machine = ? AND state = ? AND launched_at IS NOT NULL AND ended_at < ?"
    which = (machine, BilledState.GONE, at_ns)
    db.execute(
        f"INSERT INTO lives SELECT machine, launched_at, ended_at FROM machines WHERE {again}",  # noqa: S608
        which,
    )
    db.execute(
        f"UPDATE machines SET launched_at = NULL, ended_at = NULL, state = ? WHERE {again}",  # noqa: S608
        (BilledState.INTENDED, *which),
    )
