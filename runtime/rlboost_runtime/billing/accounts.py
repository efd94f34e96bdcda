"""What was bought, in micro-dollars: machines over the intervals in which they are billed, and other usage.
Also what is as good as spent: what the machines will cost even if the run ends now.

Guarantees: money and time are integers (micro-dollars, nanoseconds since the Unix epoch), summed exactly; a
machine is billed over the half-open intervals from each launch to its end (at least `min_billed_ns`), or to
the moment asked for; and the parts of a bill (`MachineBill.parts`) add up to it. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any

from rlboost_runtime.billing.launch_records import HeadMachine, MachineRecord
from rlboost_runtime.money import cost_micro_usd, split_exactly

Row = tuple[Any, ...]  # what SQLite hands out; the tables are STRICT, so columns have their declared types

_RECORDED = tuple(field.name for field in fields(MachineRecord))


class BilledState(StrEnum):
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
    """Billed machine time that made nothing that was trained on. How each is measured: `waste`."""

    BOOT = "boot"
    """Before the machine could do any work for the first time."""
    IDLE = "idle"
    """Without work, or waiting for others; also while it is being ended."""
    LOST = "lost"
    """Work whose tokens died with an instance before they were sent."""
    REDONE = "redone"
    """Work that had been done before: starting migrated responses, generating and training a step again."""


@dataclass(frozen=True, slots=True)
class BillParts:
    """A bill by what the time was good for, in micro-dollars."""

    useful: int
    """All that was not found to be wasted."""
    wasted: dict[WasteKind, int]
    """Every kind is present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineBill(MachineRecord):
    """A machine's record and what it costs up to the moment asked for.

    `launched_at` is its first launch, `billed_ns` the sum in nanoseconds over all its intervals, of which
    there are `num_lives`. The record has the present price; earlier prices are in `cost_micro_usd`.
    """

    state: BilledState
    num_lives: int
    billed_ns: int
    cost_micro_usd: int

    def parts(self, wasted_ns: Mapping[WasteKind, int]) -> BillParts:
        """Split the bill by the wasted time noted for the machine; the parts add up to `cost_micro_usd`.

        Waste is metered on another clock than bills: where more is noted than is billed, the kinds that come
        later in `WasteKind` give way.
        """
        left = self.billed_ns
        weights = []
        for kind in WasteKind:
            weights.append(min(left, wasted_ns.get(kind, 0)))
            left -= weights[-1]
        useful, *wasted = split_exactly(self.cost_micro_usd, [left, *weights])
        return BillParts(useful, dict(zip(WasteKind, wasted, strict=True)))


@dataclass(frozen=True, slots=True)
class Spending:
    """What was bought as of one read of the books: any number of moments may be asked for."""

    _accounts: tuple[Account, ...]
    _usage: tuple[tuple[int, UsageKind, int], ...]
    """(at in nanoseconds, kind, micro-dollars)."""

    def machines(self, now: float) -> list[MachineBill]:
        """Return all machines, oldest intent first, billed up to `now`."""
        return [account.bill(to_ns(now)) for account in self._accounts]

    def pauses_ns(self) -> list[tuple[int, int]]:
        """Return when the reserved machine was away between two lives: the run had ended."""
        reserved = (account for account in self._accounts if account.record.pool == "reserved")
        return [pause for account in reserved for pause in account.pauses_ns]

    def usage(self, now: float) -> dict[UsageKind, int]:
        """Return micro-dollars per kind up to `now`; every kind is present."""
        totals = dict.fromkeys(UsageKind, 0)
        for at, kind, amount in self._usage:
            totals[kind] += amount if at <= to_ns(now) else 0
        totals[UsageKind.STORAGE] += sum(account.storage_micro_usd(to_ns(now)) for account in self._accounts)
        return totals

    def rate_micro_usd_per_hour(self) -> int:
        """Return what an hour costs with the machines that are running or asked for."""
        open_accounts = (account for account in self._accounts if account.is_open)
        return sum(account.record.all_micro_usd_per_hour for account in open_accounts)

    def total_micro_usd(self, now: float) -> int:
        """Return everything spent up to `now`. Never falls as `now` grows."""
        until = to_ns(now)
        machines = sum(account.all_micro_usd(until) for account in self._accounts)
        return machines + sum(amount for at, _, amount in self._usage if at <= until)

    def totals_micro_usd(self, moments: Sequence[float]) -> list[int]:
        """Return `total_micro_usd` at each of `moments`, which ascend.

        Machines that are gone by then are not looked at again: a long run has thousands of both.
        """
        coming = deque(sorted(self._accounts, key=lambda account: account.begins or 0))
        usage = deque(sorted(self._usage))
        here: list[Account] = []
        settled, totals = 0, []
        for until in map(to_ns, moments):
            while coming and (coming[0].begins or 0) <= until:
                here.append(coming.popleft())
            while usage and usage[0][0] <= until:
                settled += usage.popleft()[2]
            settled += sum(account.all_micro_usd(until) for account in here if account.is_over(until))
            here = [account for account in here if not account.is_over(until)]
            totals.append(settled + sum(account.all_micro_usd(until) for account in here))
        return totals


class Account:
    """One machine's record and the intervals over which it is billed; an end of None is still to come."""

    __slots__ = ( "_ends", "_final", "_former", "_full_cost", "_full_storage", "_intervals", "begins",
        "record", "state", )  # fmt: skip

    def __init__(
        self,
        record: MachineRecord,
        state: BilledState,
        earlier: Sequence[tuple[int, int]],
        former: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`earlier`: intervals of its former lives; `former`: earlier prices, each after the moment until
        which it held, the oldest first. In nanoseconds."""
        self.record = record
        self.state = state
        self._former = former
        self._intervals: list[tuple[int, int | None]] = [*earlier]
        if record.launched_at is not None:
            ended_ns = None if record.ended_at is None else to_ns(record.ended_at)
            self._intervals.append((to_ns(record.launched_at), ended_ns))
        least = record.min_billed_ns
        if least:
            self._intervals = [(s, None if e is None else max(e, s + least)) for s, e in self._intervals]
        last = self._intervals[-1][1] if self._intervals else 0
        self.begins: int | None = min((start for start, _ in self._intervals), default=None)
        self._ends = last
        self._full_cost = 0 if last is None else self._cost_micro_usd(last)
        self._full_storage = 0 if last is None else self._storage_micro_usd(last)
        self._final: MachineBill | None = None

    def _billed_ns(self, until: int) -> int:
        return sum(
            max(0, (until if end is None else min(end, until)) - start) for start, end in self._intervals
        )

    @property
    def pauses_ns(self) -> list[tuple[int, int]]:
        """The times between its lives."""
        return [(end, start) for (_, end), (start, _) in pairwise(self._intervals) if end is not None]

    @property
    def is_open(self) -> bool:
        """True until the machine failed or ended."""
        return self.state in (BilledState.INTENDED, BilledState.RUNNING)

    def is_over(self, until: int) -> bool:
        """Return True if it costs nothing more after `until` (nanoseconds)."""
        return self._ends is not None and until >= self._ends

    def cost_micro_usd(self, until: int) -> int:
        """Return what it cost up to `until` (nanoseconds)."""
        return self._full_cost if self.is_over(until) else self._cost_micro_usd(until)

    def _cost_micro_usd(self, until: int) -> int:
        """Return time by price over all its prices, rounded once."""
        since_ns = priced = 0
        for end, price in self._former:
            billed_ns = self._billed_ns(min(end, until))
            priced += price * (billed_ns - since_ns)
            since_ns = billed_ns
        priced += self.record.price_micro_usd_per_hour * (self._billed_ns(until) - since_ns)
        return cost_micro_usd(1, priced)

    def storage_micro_usd(self, until: int) -> int:
        """Return what its disk and public address cost up to `until` (nanoseconds)."""
        return self._full_storage if self.is_over(until) else self._storage_micro_usd(until)

    def _storage_micro_usd(self, until: int) -> int:
        return cost_micro_usd(self.record.storage_micro_usd_per_hour, self._billed_ns(until))

    def all_micro_usd(self, until: int) -> int:
        """Return what it and its storage cost up to `until` (nanoseconds)."""
        return self.cost_micro_usd(until) + self.storage_micro_usd(until)

    def bill(self, until: int) -> MachineBill:
        """Return its bill up to `until` (nanoseconds)."""
        if not self.is_over(until):
            return self._bill(until)
        if self._final is None:
            self._final = self._bill(until)
        return self._final

    def _bill(self, until: int) -> MachineBill:
        recorded: dict[str, Any] = {name: getattr(self.record, name) for name in _RECORDED}
        if self._intervals:
            recorded["launched_at"] = to_seconds(self._intervals[0][0])
        return MachineBill(
            **recorded,
            state=self.state,
            num_lives=len(self._intervals),
            billed_ns=self._billed_ns(until),
            cost_micro_usd=self.cost_micro_usd(until),
        )


def to_ns(seconds: float) -> int:
    """Return whole microseconds as nanoseconds: a float of today's time holds no more."""
    return round(seconds * 1_000_000) * 1_000


def to_seconds(ns: int) -> float:
    """Return the seconds that `to_ns` turns into `ns` again."""
    return round(ns / 1e9, 6)


CLOUD_WIND_DOWN_S = 45.0
"""From the decision to end until a cloud has stopped billing: our 30 s to end machines, and its own delay."""
LOCAL_WIND_DOWN_S = 2.0
"""The same for processes on this machine: two looks at the budget."""

_OPEN = (BilledState.INTENDED, BilledState.RUNNING)


def committed_micro_usd(bills: Iterable[MachineBill], now_ns: int) -> int:
    """Return what machines will cost beyond `now_ns` at least: open ones the time to end them, all the
    rest of the shortest time that their clouds bill."""
    return sum(cost_micro_usd(bill.all_micro_usd_per_hour, _rest_ns(bill, now_ns)) for bill in bills)


def room_micro_usd(
    budget_micro_usd: int, spent_micro_usd: int, bills: Iterable[MachineBill], now_ns: int
) -> int:
    """Return what of a budget is neither spent nor committed; 0 or less ends the run."""
    return budget_micro_usd - spent_micro_usd - committed_micro_usd(bills, now_ns)


def _rest_ns(bill: MachineBill, now_ns: int) -> int:
    is_open = bill.state in _OPEN
    if bill.launched_at is None and not is_open:
        return 0
    started = now_ns if bill.launched_at is None else to_ns(bill.launched_at)
    rest_ns = max(0, started + bill.min_billed_ns - now_ns)
    return max(rest_ns, wind_down_ns(bill.provider)) if is_open else rest_ns


def least_micro_usd(provider: str, price_micro_usd_per_hour: int, min_billed_s: int) -> int:
    """Return what a machine launched now costs at least."""
    least_ns = max(min_billed_s * 1_000_000_000, wind_down_ns(provider))
    return cost_micro_usd(price_micro_usd_per_hour, least_ns)


def stay_micro_usd(head: HeadMachine) -> int:
    """Return what a bought head costs while it waits, after its run, to be looked at."""
    return cost_micro_usd(head.all_micro_usd_per_hour, round(head.stays_s * 1e9))


def wind_down_ns(provider: str) -> int:
    """Return how long a machine of `provider` is billed after the decision to end it."""
    return round((LOCAL_WIND_DOWN_S if provider in ("local", "ssh") else CLOUD_WIND_DOWN_S) * 1e9)
