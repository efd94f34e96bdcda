"""The run's books: which machines were wanted, billed and ended, what each step made, what happened in words.

One SQLite file (WAL). The coordinator writes it; anybody may read it while it runs and after. `rlboost down`
writes the last ends of machines once it has seen that no coordinator is left.

Guarantees:

- a call that changes the books has committed to stable storage when it returns: an intent is on disk before
  its launch is asked for;
- money and time are integers (micro-dollars, nanoseconds since the Unix epoch), summed exactly. A machine is
  billed over the half-open intervals from each launch to its end, or to the moment asked for;
- saying the same thing about a machine twice changes nothing: the first word holds;
- nothing is removed. A machine stays open (`open_machines`) from its intent until it failed or ended.

Times are given in seconds since the Unix epoch and kept to the microsecond. Safe to use from several threads.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlboost_runtime.core.money import cost_micro_usd
from rlboost_runtime.errors import NotFound, RuntimeFault

SCHEMA_VERSION = 1

Row = tuple[Any, ...]  # what SQLite hands out; the tables are STRICT, so columns have their declared types

_SCHEMA = """
CREATE TABLE IF NOT EXISTS machines (
    machine TEXT PRIMARY KEY, pool TEXT NOT NULL, provider TEXT NOT NULL, zone TEXT NOT NULL,
    accelerator TEXT NOT NULL, price_micro_usd_per_hour INTEGER NOT NULL, price_source TEXT NOT NULL,
    intended_at INTEGER NOT NULL, launched_at INTEGER, ended_at INTEGER,
    state TEXT NOT NULL, detail TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE IF NOT EXISTS lives (
    machine TEXT NOT NULL, launched_at INTEGER NOT NULL, ended_at INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, started_at INTEGER NOT NULL, ended_at INTEGER NOT NULL, tokens INTEGER NOT NULL,
    reward_mean REAL, metrics TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, at INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL, data TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS usage (
    id INTEGER PRIMARY KEY, at INTEGER NOT NULL, kind TEXT NOT NULL, micro_usd INTEGER NOT NULL,
    basis TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS waste (
    machine TEXT NOT NULL, kind TEXT NOT NULL, wasted_ns INTEGER NOT NULL, PRIMARY KEY (machine, kind)
) STRICT;
"""

_MACHINES = """
SELECT machine, pool, provider, zone, accelerator, price_micro_usd_per_hour, price_source, intended_at,
    launched_at, ended_at, state, detail
FROM machines ORDER BY intended_at, machine
"""


class MachineBookState(StrEnum):
    """A machine's life in the books."""

    INTENDED = "intended"
    """About to be asked for, or asked for without an answer yet."""
    RUNNING = "running"
    """The provider accepted it: money runs."""
    GONE = "gone"
    """The provider says that it no longer exists."""
    FAILED = "failed"
    """The launch did not happen; never billed."""


class UsageKind(StrEnum):
    """Money that is not machine time."""

    EGRESS = "egress"
    STORAGE = "storage"


class WasteKind(StrEnum):
    """Billed machine time that made nothing that was trained on."""

    BOOT = "boot"
    """From the launch until the machine's first agent could serve."""
    IDLE = "idle"
    """Able to serve, without work."""
    LOST = "lost"
    """Time that tokens took which a preemption swallowed."""
    REDONE = "redone"
    """Time that prefills of migrated responses and repeated tokens took."""


@dataclass(frozen=True, slots=True)
class MachineBill:
    """One machine and what it costs up to the moment asked for. Times in nanoseconds since the Unix epoch.

    `launched_ns` is its first launch, `billed_ns` the sum over all its intervals.
    """

    machine: str
    pool: str
    provider: str
    zone: str
    accelerator: str
    price_micro_usd_per_hour: int
    price_source: str
    intended_ns: int
    launched_ns: int | None
    ended_ns: int | None
    state: MachineBookState
    detail: str
    billed_ns: int
    cost_micro_usd: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One trained step. Times in nanoseconds since the Unix epoch; `tokens` are those trained on."""

    step: int
    started_ns: int
    ended_ns: int
    tokens: int
    reward_mean: float | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class BookEvent:
    """Something that happened, in words. `at` in seconds since the Unix epoch."""

    at: float
    kind: str
    text: str
    data: dict[str, object]


class Ledger:
    """The books in `path`; created where they do not exist.

    With `read_only` nothing is created or changed. Raises `NotFound` where there is nothing to read, and
    `RuntimeFault` where the file is not a ledger of this version.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._lock = threading.Lock()
        if read_only and not path.exists():
            raise NotFound(
                f"no ledger at {path}", "nothing has been spent before the coordinator first starts"
            )
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
            uri=True,
            timeout=10.0,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._prepare(read_only)
        except sqlite3.DatabaseError as exc:
            self._db.close()
            raise RuntimeFault(f"{path} is not a ledger: {exc}", "restore it from a backup") from exc
        except RuntimeFault:
            self._db.close()
            raise
        if not read_only:
            path.chmod(0o600)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    # --- machines -----------------------------------------------------------------------------------------

    def intend(
        self,
        machine: str,
        *,
        pool: str,
        provider: str,
        zone: str,
        accelerator: str,
        price_micro_usd_per_hour: int,
        price_source: str,
        at: float,
    ) -> None:
        """Note that `machine` is about to be launched. Launch only after this has returned."""
        if price_micro_usd_per_hour < 0:
            raise ValueError(f"price of {machine} is negative: {price_micro_usd_per_hour}")
        with self._transaction() as db:
            db.execute(
                "INSERT INTO machines (machine, pool, provider, zone, accelerator, price_micro_usd_per_hour,"
                " price_source, intended_at, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (machine) DO NOTHING",
                (
                    machine,
                    pool,
                    provider,
                    zone,
                    accelerator,
                    price_micro_usd_per_hour,
                    price_source,
                    _ns(at),
                    MachineBookState.INTENDED,
                ),
            )

    def launched(self, machine: str, at: float) -> None:
        """Note that the provider accepted the launch at `at`: billing starts.

        Also right for a machine whose launch seemed to have failed, or that has ended since: the provider's
        word that it ran is what counts. A launch later than the known end begins another billed interval (the
        reserved machine of a run that is continued). Raises `NotFound` without an intent.
        """
        with self._transaction() as db:
            _must_know(db, machine)
            _begin_another_life(db, machine, _ns(at))
            db.execute(
                "UPDATE machines SET launched_at = min(?, coalesce(ended_at, ?)), state ="
                " CASE state WHEN ? THEN state ELSE ? END WHERE machine = ? AND launched_at IS NULL",
                (_ns(at), _ns(at), MachineBookState.GONE, MachineBookState.RUNNING, machine),
            )

    def failed(self, machine: str, at: float, problem: str) -> None:
        """Note that the launch did not happen. A machine that was launched already is left as it is."""
        with self._transaction() as db:
            _must_know(db, machine)
            db.execute(
                "UPDATE machines SET state = ?, ended_at = ?, detail = ? WHERE machine = ? AND state = ?",
                (MachineBookState.FAILED, _ns(at), problem, machine, MachineBookState.INTENDED),
            )

    def ended(self, machine: str, at: float, detail: str = "") -> None:
        """Note that the provider says that the machine is gone since `at`: billing stops."""
        with self._transaction() as db:
            _must_know(db, machine)
            db.execute(
                "UPDATE machines SET state = ?, ended_at = max(?, coalesce(launched_at, ?)), detail = ?"
                " WHERE machine = ? AND state IN (?, ?)",
                (
                    MachineBookState.GONE,
                    _ns(at),
                    _ns(at),
                    detail,
                    machine,
                    MachineBookState.INTENDED,
                    MachineBookState.RUNNING,
                ),
            )

    def open_machines(self) -> list[str]:
        """Return the machines that are not known to be gone, oldest intent first."""
        rows = self._rows(
            "SELECT machine FROM machines WHERE state IN (?, ?) ORDER BY intended_at, machine",
            (MachineBookState.INTENDED, MachineBookState.RUNNING),
        )
        return [str(row[0]) for row in rows]

    def machines(self, now: float) -> list[MachineBill]:
        """Return all machines, oldest intent first, billed up to `now`."""
        with self._lock:
            self._db.execute("BEGIN")  # both tables as of one moment
            rows = self._db.execute(_MACHINES).fetchall()
            lives = self._db.execute(
                "SELECT machine, launched_at, ended_at FROM lives ORDER BY rowid"
            ).fetchall()
            self._db.execute("COMMIT")
        earlier: dict[str, list[tuple[int, int]]] = {}
        for machine, start, end in lives:
            earlier.setdefault(machine, []).append((start, end))
        return [_bill(row, earlier.get(row[0], []), _ns(now)) for row in rows]

    # --- money --------------------------------------------------------------------------------------------

    def total_micro_usd(self, now: float) -> int:
        """Return everything spent up to `now`: machine time and other usage. Never falls as `now` grows."""
        return sum(bill.cost_micro_usd for bill in self.machines(now)) + sum(self.usage(now).values())

    def rate_micro_usd_per_hour(self) -> int:
        """Return what an hour costs with the machines that are running or asked for now."""
        rows = self._rows(
            "SELECT coalesce(sum(price_micro_usd_per_hour), 0) FROM machines WHERE state IN (?, ?)",
            (MachineBookState.INTENDED, MachineBookState.RUNNING),
        )
        return int(rows[0][0])

    def add_usage(self, kind: UsageKind, micro_usd: int, basis: str, at: float) -> None:
        """Add money that is not machine time; `basis` says what was counted at which price."""
        if micro_usd < 0:
            raise ValueError(f"usage of {kind} is negative: {micro_usd}")
        with self._transaction() as db:
            db.execute(
                "INSERT INTO usage (at, kind, micro_usd, basis) VALUES (?, ?, ?, ?)",
                (_ns(at), UsageKind(kind), micro_usd, basis),
            )

    def usage(self, now: float) -> dict[UsageKind, int]:
        """Return micro-dollars per kind up to `now`; every kind is present."""
        rows = self._rows("SELECT kind, sum(micro_usd) FROM usage WHERE at <= ? GROUP BY kind", (_ns(now),))
        return dict.fromkeys(UsageKind, 0) | {UsageKind(kind): int(total) for kind, total in rows}

    def add_waste(self, kind: WasteKind, machine: str, seconds: float) -> None:
        """Add `seconds` of `machine`'s billed time that came to nothing.

        Lost or repeated tokens are given as the machine-seconds that they took. Raises `NotFound` for an
        unknown machine.
        """
        if seconds < 0:
            raise ValueError(f"wasted time of {machine} is negative: {seconds}")
        with self._transaction() as db:
            _must_know(db, machine)
            db.execute(
                "INSERT INTO waste (machine, kind, wasted_ns) VALUES (?, ?, ?) ON CONFLICT (machine, kind)"
                " DO UPDATE SET wasted_ns = wasted_ns + excluded.wasted_ns",
                (machine, WasteKind(kind), _ns(seconds)),
            )

    def wasted(self) -> dict[WasteKind, int]:
        """Return micro-dollars per kind of waste; every kind is present. Part of the total, not beside it."""
        totals = dict.fromkeys(WasteKind, 0)
        for kind, wasted_ns, price in self._rows(
            "SELECT kind, wasted_ns, price_micro_usd_per_hour FROM waste JOIN machines USING (machine)"
        ):
            totals[WasteKind(kind)] += cost_micro_usd(int(price), int(wasted_ns))
        return totals

    # --- steps and events ---------------------------------------------------------------------------------

    def record_step(
        self,
        step: int,
        *,
        started_at: float,
        ended_at: float,
        tokens: int,
        reward_mean: float | None,
        metrics: Mapping[str, float],
    ) -> None:
        """Note a trained step. A step trained again keeps its first start; the last word holds otherwise."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO steps (step, started_at, ended_at, tokens, reward_mean, metrics)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (step) DO UPDATE SET"
                " started_at = min(started_at, excluded.started_at), ended_at = excluded.ended_at,"
                " tokens = excluded.tokens, reward_mean = excluded.reward_mean, metrics = excluded.metrics",
                (step, _ns(started_at), _ns(ended_at), tokens, reward_mean, json.dumps(dict(metrics))),
            )

    def steps(self) -> list[StepRecord]:
        """Return the trained steps in order."""
        rows = self._rows(
            "SELECT step, started_at, ended_at, tokens, reward_mean, metrics FROM steps ORDER BY step"
        )
        return [
            StepRecord(int(step), int(start), int(end), int(tokens), reward, json.loads(metrics))
            for step, start, end, tokens, reward, metrics in rows
        ]

    def note(self, at: float, kind: str, text: str, **data: object) -> None:
        """Note something that happened. `data` must be JSON values and hold no secret."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO events (at, kind, text, data) VALUES (?, ?, ?, ?)",
                (_ns(at), kind, text, json.dumps(data)),
            )

    def events(self, last: int | None = None) -> list[BookEvent]:
        """Return what happened, oldest first; only the `last` ones where given."""
        rows = self._rows(
            "SELECT at, kind, text, data FROM events ORDER BY id DESC LIMIT ?",
            (-1 if last is None else last,),
        )
        return [
            BookEvent(int(at) / 1e9, str(kind), str(text), json.loads(data))
            for at, kind, text, data in reversed(rows)
        ]

    # --- SQLite -------------------------------------------------------------------------------------------

    def _prepare(self, read_only: bool) -> None:
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut, not only a crash
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA_VERSION):
            raise RuntimeFault(
                f"the ledger has schema version {version}, this program knows {SCHEMA_VERSION}",
                "use the RLBoost version that the run was started with",
            )
        if not read_only and version == 0:
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, query: str, parameters: tuple[object, ...] = ()) -> list[Row]:
        with self._lock:
            return self._db.execute(query, parameters).fetchall()


def _ns(seconds: float) -> int:
    """Return whole microseconds as nanoseconds: a float of today's time holds no more."""
    return round(seconds * 1_000_000) * 1_000


def _must_know(db: sqlite3.Connection, machine: str) -> None:
    if db.execute("SELECT 1 FROM machines WHERE machine = ?", (machine,)).fetchone() is None:
        raise NotFound(f"the ledger has no machine {machine}", "an intent is written before each launch")


def _begin_another_life(db: sqlite3.Connection, machine: str, at_ns: int) -> None:
    """Where `machine` had been billed and ended before `at_ns`, file that interval and forget it here."""
    again = "machine = ? AND state = ? AND launched_at IS NOT NULL AND ended_at < ?"
    which = (machine, MachineBookState.GONE, at_ns)
    db.execute(
        f"INSERT INTO lives SELECT machine, launched_at, ended_at FROM machines WHERE {again}",  # noqa: S608
        which,
    )
    db.execute(
        f"UPDATE machines SET launched_at = NULL, ended_at = NULL, state = ? WHERE {again}",  # noqa: S608
        (MachineBookState.INTENDED, *which),
    )


def _bill(row: Row, earlier: Sequence[tuple[int, int]], until: int) -> MachineBill:
    machine, pool, provider, zone, accelerator, price, source, intended, launched, ended, state, detail = row
    intervals = [*earlier] if launched is None else [*earlier, (launched, until if ended is None else ended)]
    billed = sum(max(0, min(end, until) - start) for start, end in intervals)
    first = intervals[0][0] if intervals else None
    return MachineBill(
        machine=str(machine),
        pool=str(pool),
        provider=str(provider),
        zone=str(zone),
        accelerator=str(accelerator),
        price_micro_usd_per_hour=price,
        price_source=str(source),
        intended_ns=intended,
        launched_ns=first,
        ended_ns=ended,
        state=MachineBookState(str(state)),
        detail=str(detail),
        billed_ns=billed,
        cost_micro_usd=cost_micro_usd(price, billed),
    )
