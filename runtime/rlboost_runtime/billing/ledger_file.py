"""The ledger's SQLite file (WAL): its schema, opening it, and changing it safely from several threads.

Each row has a checksum in the table `checks`, written by triggers in the same transaction. They are compared
when the file is opened, so that a changed digit is an error that names table and row, never another bill.
A file beside it has the number of durable transactions: a ledger with fewer has lost some. The rows of a
ledger of an earlier version get their checksums when a coordinator first opens it.

Three of its books: trained steps, what moving weights cost, and what happened in words.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import struct
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlboost_runtime.billing.accounts import Row, UsageKind, to_ns
from rlboost_runtime.errors import NotFound, RuntimeFault
from rlboost_runtime.logs import event as log_event

SCHEMA_VERSION = 1

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
CREATE TABLE IF NOT EXISTS former_prices (
    machine TEXT NOT NULL, until INTEGER NOT NULL, price_micro_usd_per_hour INTEGER NOT NULL
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
CREATE TABLE IF NOT EXISTS storage_prices (
    machine TEXT PRIMARY KEY, micro_usd_per_hour INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS billing_minimums (
    machine TEXT PRIMARY KEY, min_billed_s INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS egress_prices (
    machine TEXT PRIMARY KEY, micro_usd_per_gb INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS egress (
    transfer TEXT PRIMARY KEY, machine TEXT NOT NULL, source TEXT NOT NULL, zone TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, micro_usd INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS waste (
    machine TEXT NOT NULL, kind TEXT NOT NULL, wasted_ns INTEGER NOT NULL, PRIMARY KEY (machine, kind)
) STRICT;
CREATE TABLE IF NOT EXISTS boots (
    machine TEXT PRIMARY KEY, boot TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS served (
    id INTEGER PRIMARY KEY, requests INTEGER NOT NULL, tokens INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS checks (
    name TEXT NOT NULL, id INTEGER NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (name, id)
) STRICT, WITHOUT ROWID;
"""
_TABLES = tuple(name for name in re.findall(r"EXISTS (\w+)", _SCHEMA) if name != "checks")
_CHECKED = """
CREATE TEMP TRIGGER checked_{event}_{table} AFTER {event} ON main.{table} BEGIN
    DELETE FROM checks WHERE name = '{table}' AND id = {old}.rowid;
    {insert}
END
"""
_INSERT_CHECK = (
    "INSERT INTO checks VALUES ('{table}', NEW.rowid, row_check('{table}', NEW.rowid, {columns}));"
)
_WRONG = """
SELECT t.rowid FROM {table} t LEFT JOIN checks c ON c.name = '{table}' AND c.id = t.rowid
WHERE c.crc IS NOT row_check('{table}', t.rowid, {columns})
UNION ALL SELECT id FROM checks WHERE name = '{table}' AND id NOT IN (SELECT rowid FROM {table}) LIMIT 1
"""
_COUNT = "INSERT INTO checks VALUES (?, 0, 1) ON CONFLICT DO UPDATE SET crc = crc + 1 RETURNING crc"
_MARK = struct.Struct("<QI")
_COMMITS = "commits"  # the row of `checks` that counts durable transactions


class LedgerFile:
    """The open file. Subclasses are the books in it, each with its own tables.

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
        self._path = path
        self._mark: int | None = None
        try:
            self._prepare(read_only)
            self._verify()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:
            self._db.close()
            raise RuntimeFault(f"{path} is not a ledger: {exc}", _remedy(path)) from exc
        except RuntimeFault:
            self._db.close()
            raise
        if not read_only:
            path.chmod(0o600)
            self._mark = os.open(_mark_path(path), os.O_WRONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()
            if self._mark is not None:
                os.close(self._mark)
                self._mark = None

    def _prepare(self, read_only: bool) -> None:
        self._db.create_function("row_check", -1, _row_check, deterministic=True)
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut, not only a crash
            self._db.execute("PRAGMA recursive_triggers = ON")  # a row that is replaced counts as deleted
        version = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA_VERSION):
            raise RuntimeFault(
                f"the ledger has schema version {version}, this program knows {SCHEMA_VERSION}",
                "use the RLBoost version that the run was started with",
            )
        if read_only:
            return
        is_old = version > 0 and not self._has("checks")
        if not self._has_all_tables():
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        for table in _TABLES:
            self._watch(table)
            if is_old:
                columns = self._columns(table)
                self._db.execute(
                    f"INSERT INTO checks SELECT '{table}', rowid, row_check('{table}', rowid, {columns})"  # noqa: S608
                    f" FROM {table}"
                )
        if is_old:
            log_event(log, "ledger.unchecked", why="it is of an earlier version: checked from now on")

    def _has(self, table: str) -> bool:
        """Return True if the file has a table: one made by an older version, and only read, lacks later
        ones."""
        return bool(self._db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone())

    def _columns(self, table: str, row: str = "") -> str:
        names = [str(info[1]) for info in self._db.execute(f"PRAGMA table_info({table})")]
        return ", ".join(f"{row}{name}" for name in names)

    def _watch(self, table: str) -> None:
        """Have this connection keep the checksums of a table's rows."""
        insert = _INSERT_CHECK.format(table=table, columns=self._columns(table, "NEW."))
        for event, old, new in (("INSERT", "NEW", insert), ("UPDATE", "OLD", insert), ("DELETE", "OLD", "")):
            self._db.execute(_CHECKED.format(event=event, table=table, old=old, insert=new))

    def _verify(self) -> None:
        """Raise `RuntimeFault` for the first row that is not as it was written, or where commits are lost."""
        marked = _read_mark(_mark_path(self._path))
        with self._snapshot():
            if not self._has("checks"):
                if marked:
                    raise _damaged(self._path, "its tables are gone")
                return  # of an earlier version, and only read
            commits = self._db.execute("SELECT crc FROM checks WHERE name = ?", (_COMMITS,)).fetchone()
            if (commits is not None and commits[0] < marked) or (commits is None and marked):
                lost = f"it has {0 if commits is None else commits[0]} transactions, {marked} were committed"
                raise _damaged(self._path, lost)
            for table in _TABLES:
                if not self._has(table):  # of an earlier version, and only read: then it has no rows
                    query = f"SELECT id FROM checks WHERE name = '{table}' LIMIT 1"  # noqa: S608
                else:
                    query = _WRONG.format(table=table, columns=self._columns(table, "t."))
                wrong = self._db.execute(query).fetchone()
                if wrong is not None:
                    raise _damaged(self._path, f"row {wrong[0]} of table {table} is not as it was written")

    def _has_all_tables(self) -> bool:
        """Return True if no table is missing: a file made by an older version lacks later tables, and a full
        disk must not keep a complete one from being opened."""
        found = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        return set(re.findall(r"EXISTS (\w+)", _SCHEMA)) <= found

    @contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Change something; `durable`: committed to stable storage, and not only beyond this process."""
        with self._lock:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                if durable:
                    ((commits,),) = self._db.execute(_COUNT, (_COMMITS,)).fetchall()
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            if durable and self._mark is not None:  # after the commit: never ahead of it
                count = commits.to_bytes(8, "little")
                os.pwrite(self._mark, _MARK.pack(commits, zlib.crc32(count)), 0)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Read several times as of one moment."""
        with self._lock:
            self._db.execute("BEGIN")
            try:
                yield
            finally:
                self._db.execute("COMMIT")

    def _rows(self, query: str, parameters: tuple[object, ...] = ()) -> list[Row]:
        with self._lock:
            return self._db.execute(query, parameters).fetchall()


def in_one_file(path: Path) -> bytes:
    """Return the ledger in `path` as one file, which needs no other, as of one moment; it may be written
    meanwhile. Raises `sqlite3.Error`."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        source = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        target = sqlite3.connect(copy)
        try:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        finally:
            target.close()
            source.close()
        return copy.read_bytes()


def _row_check(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def _mark_path(path: Path) -> Path:
    return path.with_suffix(".mark")


def _read_mark(path: Path) -> int:
    """Return how many durable transactions were committed at least; 0 where that is unknown."""
    try:
        commits, crc = _MARK.unpack(path.read_bytes())
    except (OSError, struct.error):
        return 0
    if zlib.crc32(int(commits).to_bytes(8, "little")) == crc:
        return int(commits)
    log_event(log, "ledger.mark_damaged", path=str(path), why="lost transactions would not be noticed")
    return 0


def _damaged(path: Path, problem: str) -> RuntimeFault:
    return RuntimeFault(f"{path} is damaged: {problem}", _remedy(path))


def _remedy(path: Path) -> str:
    return (
        f"restore {path.name} from a backup; or move {path.stem}.* out of {path.parent}: the bill then starts"
        " at 0, and earlier costs are only in the cloud's own bill"
    )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One trained step. Times in nanoseconds since the Unix epoch; `tokens` are those trained on."""

    step: int
    started_ns: int
    ended_ns: int
    tokens: int
    reward_mean: float | None
    metrics: dict[str, float]


class StepSummary(NamedTuple):
    """All trained steps in three figures."""

    num_steps: int
    tokens: int
    """Trained on, in all steps."""
    reward_means: list[float | None]
    """Of the last steps, oldest first."""


class StepLedger(LedgerFile):
    """Trained steps. A recorded step has committed to stable storage."""

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
        """Note a trained step. A step trained again keeps its first start; otherwise the last record
        holds."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO steps (step, started_at, ended_at, tokens, reward_mean, metrics)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (step) DO UPDATE SET"
                " started_at = min(started_at, excluded.started_at), ended_at = excluded.ended_at,"
                " tokens = excluded.tokens, reward_mean = excluded.reward_mean, metrics = excluded.metrics",
                (step, to_ns(started_at), to_ns(ended_at), tokens, reward_mean, json.dumps(dict(metrics))),
            )

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add to the metrics of a trained step, or replace them; return False if that changes nothing."""
        known = next((record.metrics for record in self.steps() if record.step == step), None)
        if known is None or known.items() >= metrics.items():
            return False
        with self._transaction() as db:
            merged = json.dumps(known | dict(metrics))
            db.execute("UPDATE steps SET metrics = ? WHERE step = ?", (merged, step))
        return True

    def steps(self) -> list[StepRecord]:
        """Return the trained steps in order."""
        rows = self._rows(
            "SELECT step, started_at, ended_at, tokens, reward_mean, metrics FROM steps ORDER BY step"
        )
        return [
            StepRecord(int(step), int(start), int(end), int(tokens), reward, json.loads(metrics))
            for step, start, end, tokens, reward, metrics in rows
        ]

    def step_summary(self, last: int) -> StepSummary:
        """Return how many steps were trained, on how many tokens, and the rewards of the `last` ones.

        Costs little however many there are, unlike `steps`.
        """
        (totals,) = self._rows("SELECT count(*), coalesce(sum(tokens), 0) FROM steps")
        rewards = self._rows("SELECT reward_mean FROM steps ORDER BY step DESC LIMIT ?", (last,))
        return StepSummary(int(totals[0]), int(totals[1]), [row[0] for row in reversed(rewards)])


GB = 10**9
PEERS = "peers"


@dataclass(frozen=True, slots=True)
class Route:
    """All that was billed from `source` ("head", "bucket") to the machines of `zone`."""

    source: str
    zone: str
    num_bytes: int
    micro_usd: int


class EgressLedger(LedgerFile):
    """Transfers and their prices.

    A transfer is billed once, however often it is reported, also by the next coordinator; what a machine owes
    is exact to the micro-dollar over all its transfers. Bytes from a bucket are billed at the head's price,
    because the job gives no other. Peers are in the machine's own zone and cost nothing.
    """

    def set_egress_price(self, machine: str, micro_usd_per_gb: int) -> None:
        """Note what a gigabyte from the head to `machine` costs; the first record holds."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO egress_prices (machine, micro_usd_per_gb) VALUES (?, ?)"
                " ON CONFLICT (machine) DO NOTHING",
                (machine, micro_usd_per_gb),
            )

    def zone_of(self, machine: str) -> str:
        """Return a machine's place as PROVIDER/ZONE; empty if unknown."""
        rows = self._rows("SELECT provider, zone FROM machines WHERE machine = ?", (machine,))
        return f"{rows[0][0]}/{rows[0][1]}" if rows else ""

    def add_egress(self, transfer: str, machine: str, source: str, num_bytes: int, at: float) -> int:
        """Bill bytes that `machine` received from "head", "bucket" or "peers"; return the micro-dollars.

        `transfer`: an id, unique in the run.
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


class NoteLedger(LedgerFile):
    """Things that happened, oldest first. Notes wait in memory for `write_notes`: no caller waits for the
    disk."""

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
