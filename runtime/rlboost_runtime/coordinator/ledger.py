"""The run's books: which machines were wanted, billed and ended, what each step made, what happened in words.

One SQLite file (WAL). The coordinator writes it; anybody may read it while it runs and after. `rlboost down`
writes the last ends of machines once it has seen that no coordinator is left.

Guarantees:

- a call that says something of a machine's life, a step or money has committed to stable storage when it
  returns: an intent is on disk before its launch is asked for. Waste survives a killed process, not a power
  cut; notes wait in memory for `write_notes`, so that nobody waits for the disk to tell a story;
- money and time are integers (micro-dollars, nanoseconds since the Unix epoch), summed exactly. A machine is
  billed over the half-open intervals from each launch to its end, or to the moment asked for;
- saying the same thing about a machine twice changes nothing: the first word holds;
- nothing is removed. A machine stays open (`open_machines`) from its intent until it failed or ended.

Times are given in seconds since the Unix epoch and kept to the microsecond. Safe to use from several threads.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlboost_runtime.core.money import cost_micro_usd
from rlboost_runtime.errors import NotFound, RuntimeFault
from rlboost_runtime.logs import event as log_event

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_WAITING_NOTES = 10_000
"""Notes kept in memory while they cannot be written; then the oldest are dropped."""

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
FROM machines WHERE {which} ORDER BY intended_at, machine
"""
_END_OF_TIME = 2**63 - 1  # nanoseconds; an SQLite integer's largest
_ALL, _OPEN, _CLOSED = "1", "state IN ('intended', 'running')", "state IN ('failed', 'gone')"


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
    """Billed after an agent of it could serve, without work; also while it is being ended."""
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


class StepSummary(NamedTuple):
    """All trained steps in three figures."""

    num_steps: int
    tokens: int
    """Trained on, in all steps."""
    reward_means: list[float | None]
    """Of the last steps, oldest first."""


@dataclass(frozen=True, slots=True)
class Spending:
    """What was bought as of one read of the books: any number of moments may be asked for."""

    _accounts: tuple[_Account, ...]
    _usage: tuple[tuple[int, UsageKind, int], ...]
    """(at in nanoseconds, kind, micro-dollars)."""

    def machines(self, now: float) -> list[MachineBill]:
        """Return all machines, oldest intent first, billed up to `now`."""
        return [account.bill(_ns(now)) for account in self._accounts]

    def usage(self, now: float) -> dict[UsageKind, int]:
        """Return micro-dollars per kind up to `now`; every kind is present."""
        totals = dict.fromkeys(UsageKind, 0)
        for at, kind, amount in self._usage:
            totals[kind] += amount if at <= _ns(now) else 0
        return totals

    def total_micro_usd(self, now: float) -> int:
        """Return everything spent up to `now`. Never falls as `now` grows."""
        until = _ns(now)
        machines = sum(account.cost_micro_usd(until) for account in self._accounts)
        return machines + sum(amount for at, _, amount in self._usage if at <= until)


class _Account:
    """One machine's row and the intervals over which it is billed; an end of None is still to come."""

    __slots__ = ("_begins", "_ends", "_full_cost", "_intervals", "_price", "_row")

    def __init__(self, row: Row, earlier: Sequence[tuple[int, int]]) -> None:
        price, launched, ended = row[5], row[8], row[9]
        self._row = row
        self._price: int = price
        self._intervals: list[tuple[int, int | None]] = [*earlier]
        if launched is not None:
            self._intervals.append((launched, ended))
        last = self._intervals[-1][1] if self._intervals else 0
        self._begins: int | None = min((start for start, _ in self._intervals), default=None)
        self._ends = last
        self._full_cost = 0 if last is None else cost_micro_usd(price, self._billed_ns(last))

    def _billed_ns(self, until: int) -> int:
        return sum(
            max(0, (until if end is None else min(end, until)) - start) for start, end in self._intervals
        )

    def cost_micro_usd(self, until: int) -> int:
        """Return what it cost up to `until` (nanoseconds)."""
        if self._begins is None or until <= self._begins:
            return 0
        if self._ends is not None and until >= self._ends:
            return self._full_cost
        return cost_micro_usd(self._price, self._billed_ns(until))

    def bill(self, until: int) -> MachineBill:
        """Return its bill up to `until` (nanoseconds)."""
        machine, pool, provider, zone, accelerator, price, source, intended = self._row[:8]
        ended, state, detail = self._row[9:]
        return MachineBill(
            machine=str(machine),
            pool=str(pool),
            provider=str(provider),
            zone=str(zone),
            accelerator=str(accelerator),
            price_micro_usd_per_hour=price,
            price_source=str(source),
            intended_ns=intended,
            launched_ns=self._intervals[0][0] if self._intervals else None,
            ended_ns=ended,
            state=MachineBookState(str(state)),
            detail=str(detail),
            billed_ns=self._billed_ns(until),
            cost_micro_usd=self.cost_micro_usd(until),
        )


@dataclass(frozen=True, slots=True)
class _ClosedBills:
    """Bills of the machines that failed or are gone: the same until somebody writes about one."""

    version: int
    """Of the data, as other connections change it."""
    bills: list[MachineBill]
    cost_micro_usd: int
    until: int
    """The last end among them; they hold from then on."""


class Ledger:
    """The books in `path`; created where they do not exist.

    With `read_only` nothing is created or changed. Raises `NotFound` where there is nothing to read, and
    `RuntimeFault` where the file is not a ledger of this version.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._lock = threading.Lock()
        self._notes: deque[tuple[int, str, str, str]] = deque(maxlen=MAX_WAITING_NOTES)
        self._closed: _ClosedBills | None = None
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
        """Write what waits and close the file."""
        self.write_notes()
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
                "UPDATE machines SET launched_at = min(?, coalesce(ended_at, ?))"
                " WHERE machine = ? AND launched_at IS NULL AND state = ?",
                (_ns(at), _ns(at), machine, MachineBookState.GONE),
            )
            db.execute(
                "UPDATE machines SET launched_at = ?, ended_at = NULL, state = ?"
                " WHERE machine = ? AND launched_at IS NULL",
                (_ns(at), MachineBookState.RUNNING, machine),
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

    def running_machines(self) -> set[str]:
        """Return the machines for which money runs."""
        rows = self._rows("SELECT machine FROM machines WHERE state = ?", (MachineBookState.RUNNING,))
        return {str(row[0]) for row in rows}

    def unbilled_machines(self) -> set[str]:
        """Return the machines of which no launch is noted: not yet, failed, or not heard of."""
        return {str(row[0]) for row in self._rows("SELECT machine FROM machines WHERE launched_at IS NULL")}

    def last_end(self) -> float | None:
        """Return when the last machine ended that did, or None."""
        (row,) = self._rows("SELECT max(ended_at) FROM machines")
        return None if row[0] is None else int(row[0]) / 1e9

    def machines(self, now: float) -> list[MachineBill]:
        """Return all machines, oldest intent first, billed up to `now`."""
        until = _ns(now)
        closed, accounts = self._bought(until)
        bills = [*closed.bills, *(account.bill(until) for account in accounts)]
        return sorted(bills, key=lambda bill: (bill.intended_ns, bill.machine))

    def spending(self) -> Spending:
        """Return all that was bought until now, for many questions at once."""
        with self._snapshot():
            accounts = self._accounts(_ALL)
            rows = self._db.execute("SELECT at, kind, micro_usd FROM usage").fetchall()
        usage = tuple((int(at), UsageKind(kind), int(amount)) for at, kind, amount in rows)
        return Spending(tuple(accounts), usage)

    # --- money --------------------------------------------------------------------------------------------

    def total_micro_usd(self, now: float) -> int:
        """Return everything spent up to `now`: machine time and other usage. Never falls as `now` grows."""
        until = _ns(now)
        closed, accounts = self._bought(until)
        machines = closed.cost_micro_usd + sum(account.cost_micro_usd(until) for account in accounts)
        return machines + sum(self.usage(now).values())

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
        """Add `seconds` of `machine`'s billed time that came to nothing, as `add_wastes`."""
        self.add_wastes({(kind, machine): seconds})

    def add_wastes(self, seconds: Mapping[tuple[WasteKind, str], float]) -> None:
        """Add seconds of billed time that came to nothing, by kind and machine: all of them or, on an error,
        none.

        Lost or repeated tokens are given as the machine-seconds that they took. Raises `NotFound` for an
        unknown machine.
        """
        with self._transaction(durable=False) as db:
            for (kind, machine), wasted_s in seconds.items():
                if wasted_s < 0:
                    raise ValueError(f"wasted time of {machine} is negative: {wasted_s}")
                _must_know(db, machine)
                db.execute(
                    "INSERT INTO waste (machine, kind, wasted_ns) VALUES (?, ?, ?)"
                    " ON CONFLICT (machine, kind) DO UPDATE SET wasted_ns = wasted_ns + excluded.wasted_ns",
                    (machine, WasteKind(kind), _ns(wasted_s)),
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

    def step_summary(self, last: int) -> StepSummary:
        """Return how many steps were trained, on how many tokens, and the rewards of the `last` ones.

        Costs little however many there are, unlike `steps`.
        """
        (totals,) = self._rows("SELECT count(*), coalesce(sum(tokens), 0) FROM steps")
        rewards = self._rows("SELECT reward_mean FROM steps ORDER BY step DESC LIMIT ?", (last,))
        return StepSummary(int(totals[0]), int(totals[1]), [row[0] for row in reversed(rewards)])

    def note(self, at: float, kind: str, text: str, **data: object) -> None:
        """Note something that happened; touches no disk: `write_notes` does, now and then.

        `data` must be JSON values and hold no secret.
        """
        with self._lock:
            self._notes.append((_ns(at), kind, text, json.dumps(data)))

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
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Change something; `durable`: committed to stable storage, and not only beyond this process."""
        with self._lock:
            if durable:
                self._closed = None
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

    def _accounts(self, which: str) -> list[_Account]:
        earlier: dict[str, list[tuple[int, int]]] = {}
        for machine, start, end in self._db.execute(
            "SELECT machine, launched_at, ended_at FROM lives ORDER BY rowid"
        ):
            earlier.setdefault(machine, []).append((start, end))
        rows = self._db.execute(_MACHINES.format(which=which)).fetchall()
        return [_Account(row, earlier.get(row[0], [])) for row in rows]

    def _bought(self, until: int) -> tuple[_ClosedBills, list[_Account]]:
        """Return bills that are final by `until`, and the accounts of all other machines."""
        with self._snapshot():
            version = int(self._db.execute("PRAGMA data_version").fetchone()[0])
            if self._closed is None or self._closed.version != version:
                bills = [account.bill(_END_OF_TIME) for account in self._accounts(_CLOSED)]
                self._closed = _ClosedBills(
                    version,
                    bills,
                    sum(bill.cost_micro_usd for bill in bills),
                    max((bill.ended_ns or 0 for bill in bills), default=0),
                )
            if until < self._closed.until:
                return _ClosedBills(version, [], 0, 0), self._accounts(_ALL)
            return self._closed, self._accounts(_OPEN)


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
