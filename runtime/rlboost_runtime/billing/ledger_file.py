"""The ledger's SQLite file (WAL): its schema, opening it, and changing it safely from several threads."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlboost_runtime.billing.accounts import Row
from rlboost_runtime.errors import NotFound, RuntimeFault

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
"""


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
        if not read_only and not self._has_all_tables():
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )

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
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

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
