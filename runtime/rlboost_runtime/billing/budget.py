"""Money that is as good as spent: what the machines will cost even if the run ends now. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rlboost_runtime.billing.accounts import BilledState, MachineBill, to_ns
from rlboost_runtime.billing.launch_records import HeadMachine
from rlboost_runtime.money import cost_micro_usd

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
