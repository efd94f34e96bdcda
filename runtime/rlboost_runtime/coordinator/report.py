"""The cost report: what a run spent, on what, and what the same would have cost without spot machines.

Pure: everything comes out of the ledger, the budget and the moment given. Guarantees, in whole micro-dollars:

- `total_usd` is the sum of the machines' `cost_usd` plus `other_usd`, and also `useful_usd` plus `wasted_usd`
  plus `other_usd`; so is each machine's `cost_usd` its `useful_usd` plus its `wasted_usd`;
- `steps[].usd` plus `outside_steps_usd` is `total_usd`: a step pays for everything from the end of the step
  before it (the first: from its own start) to its own end;
- a dollar figure is the decimal number of its micro-dollars, so sums over rounded figures are exact again.

What counts as waste, and how it is measured, is in `waste`. The counterfactual is in `counterfactual`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlboost_runtime.coordinator.accounts import BillParts, MachineBill, Spending, WasteKind
from rlboost_runtime.coordinator.counterfactual import counterfactual
from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.coordinator.ledger_steps import StepRecord
from rlboost_runtime.core.money import MICRO_USD_PER_USD, parse_usd
from rlboost_runtime.job import Budget
from rlboost_runtime.reward_failures import count_failures

_POOLS = ("reserved", "spot")


def cost_report(ledger: Ledger, now_wall: float, run: str, budget: Budget | None = None) -> dict[str, object]:
    """Return the report of `run` up to `now_wall` (seconds since the Unix epoch); JSON values only."""
    spending = ledger.spending()
    bills = spending.machines(now_wall)
    wasted = ledger.wasted_ns()
    parts = [bill.parts(wasted.get(bill.machine, {})) for bill in bills]
    steps = ledger.steps()
    total, rate = spending.total_micro_usd(now_wall), ledger.rate_micro_usd_per_hour()
    before, spent = _spent_per_step(spending, steps)
    tokens = sum(step.tokens for step in steps)
    rewards = count_failures(step.metrics for step in steps)
    return {
        "run": run,
        "as_of": now_wall,
        "total_usd": _usd(total),
        "rate_usd_per_hour": _usd(rate),
        "budget": _budget(budget or Budget(), total, rate),
        "compute_usd": {
            pool: _usd(sum(b.cost_micro_usd for b in bills if b.pool == pool)) for pool in _POOLS
        },
        "other_usd": {str(kind): _usd(amount) for kind, amount in spending.usage(now_wall).items()},
        "useful_usd": _usd(sum(p.useful for p in parts)),
        "wasted_usd": {str(kind): _usd(sum(p.wasted[kind] for p in parts)) for kind in WasteKind},
        "tokens_trained": tokens,
        "usd_per_million_tokens": _usd_per_million(total, tokens),
        "counterfactual": counterfactual(bills, steps, spent),
        "steps": [_step(s, usd) for s, usd in zip(steps, spent, strict=True)],
        "outside_steps_usd": {"before": _usd(before), "after": _usd(total - before - sum(spent))},
        "machines": [_machine(b, p) for b, p in zip(bills, parts, strict=True)],
        "price_sources": sorted({b.price_source for b in bills}),
        "rewards": rewards.as_json(),
        "notes": [*_notes(bills), *([rewards.in_words()] if rewards.failed else [])],
    }


def _spent_per_step(spending: Spending, steps: Sequence[StepRecord]) -> tuple[int, list[int]]:
    """Return micro-dollars before the first step and per step: differences of a total that never falls.

    A step that was trained again ended after later ones that were not yet: these pay nothing so far.
    """
    if not steps:
        return 0, []
    moments = [_seconds(steps[0].started_ns)]
    for step in steps:
        moments.append(max(moments[-1], _seconds(step.ended_ns)))
    totals = spending.totals_micro_usd(moments)
    return totals[0], [after - before for before, after in itertools.pairwise(totals)]


def _budget(budget: Budget, total: int, rate: int) -> dict[str, object]:
    """Return the job's bounds and what is left; `hours_left`: at the present rate, None where none runs."""
    left = None if budget.max_usd is None else parse_usd(budget.max_usd) - total
    return {
        "max_usd": budget.max_usd,
        "left_usd": None if left is None else _usd(left),
        "hours_left": None if left is None or rate == 0 else round(max(0, left) / rate, 4),
        "max_usd_per_hour": budget.max_usd_per_hour,
    }


def _step(step: StepRecord, micro_usd: int) -> dict[str, object]:
    return {
        "step": step.step,
        "usd": _usd(micro_usd),
        "tokens": step.tokens,
        "seconds": (step.ended_ns - step.started_ns) / 1e9,
        "started_at": _seconds(step.started_ns),
        "ended_at": _seconds(step.ended_ns),
        "reward_mean": step.reward_mean,
        "usd_per_million_tokens": _usd_per_million(micro_usd, step.tokens),
    }


def _machine(bill: MachineBill, parts: BillParts) -> dict[str, object]:
    return {
        "id": bill.machine,
        "pool": bill.pool,
        "provider": bill.provider,
        "zone": bill.zone,
        "accelerator": bill.accelerator,
        "state": str(bill.state),
        "started_at": None if bill.launched_ns is None else _seconds(bill.launched_ns),
        "ended_at": None if bill.ended_ns is None else _seconds(bill.ended_ns),
        "num_lives": bill.num_lives,
        "billed_s": bill.billed_ns / 1e9,
        "price_usd_per_hour": _usd(bill.price_micro_usd_per_hour),
        "price_source": bill.price_source,
        "cost_usd": _usd(bill.cost_micro_usd),
        "useful_usd": _usd(parts.useful),
        "wasted_usd": {str(kind): _usd(amount) for kind, amount in parts.wasted.items()},
    }


def _notes(bills: Sequence[MachineBill]) -> list[str]:
    notes = []
    if any(b.provider == "local" for b in bills):
        notes.append(
            "prices of local machines are the job file's own (price_usd_per_hour): nobody is charged for them"
        )
    if any(b.state == "intended" for b in bills):
        notes.append("machines whose launch is not confirmed yet are listed at no cost")
    if any(b.num_lives > 1 for b in bills):
        notes.append("the run was resumed: the time in between is not billed")
    return notes


def _seconds(ns: int) -> float:
    """Return seconds; the ledger keeps microseconds, a float of today's time no more."""
    return round(ns / 1e9, 6)


def _usd(micro_usd: int) -> float:
    """Return the float nearest to the dollars: printed, it is the exact decimal (up to 9 billion dollars)."""
    return micro_usd / MICRO_USD_PER_USD


def _usd_per_million(micro_usd: int, tokens: int) -> float | None:
    """Micro-dollars per token are dollars per million tokens."""
    return None if tokens == 0 else round(micro_usd / tokens, 6)
