"""The cost report: what a run spent, on what, and what the same would have cost without spot machines.

Pure: everything comes out of the ledger and the moment given. Guarantees, in whole micro-dollars:

- `total_usd` is the sum of the machines' `cost_usd` plus `other_usd`;
- `steps[].usd` plus `outside_steps_usd` is `total_usd`: a step pays for everything from the end of the step
  before it (the first: from its own start) to its own end;
- a dollar figure is the decimal number of its micro-dollars, so sums over rounded figures are exact again.

The counterfactual takes three figures from each step's metrics, where the coordinator put them:
`reserved_tokens` (tokens that the reserved pool generated), `reserved_rollout_s` (seconds during which it was
generating) and `train_busy_s` (training without waiting). Where they are missing it is null, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlboost_runtime.coordinator.ledger import Ledger, MachineBill, Spending, StepRecord
from rlboost_runtime.core.money import MICRO_USD_PER_USD, cost_micro_usd, format_usd

_NS_PER_S = 1_000_000_000
_POOLS = ("reserved", "spot")


def cost_report(ledger: Ledger, now_wall: float, run: str) -> dict[str, object]:
    """Return the report of `run` up to `now_wall` (seconds since the Unix epoch); JSON values only."""
    spending = ledger.spending()
    bills = spending.machines(now_wall)
    steps = ledger.steps()
    total = spending.total_micro_usd(now_wall)
    spent = _spent_per_step(spending, steps)
    tokens = sum(step.tokens for step in steps)
    before = spending.total_micro_usd(_seconds(steps[0].started_ns)) if steps else 0
    return {
        "run": run,
        "as_of": now_wall,
        "total_usd": _usd(total),
        "rate_usd_per_hour": _usd(ledger.rate_micro_usd_per_hour()),
        "compute_usd": {
            pool: _usd(sum(b.cost_micro_usd for b in bills if b.pool == pool)) for pool in _POOLS
        },
        "other_usd": {str(kind): _usd(amount) for kind, amount in spending.usage(now_wall).items()},
        "wasted_usd": {str(kind): _usd(amount) for kind, amount in ledger.wasted().items()},
        "tokens_trained": tokens,
        "usd_per_million_tokens": _usd_per_million(total, tokens),
        "counterfactual": _counterfactual(bills, steps, spent),
        "steps": [
            {
                "step": s.step,
                "usd": _usd(usd),
                "tokens": s.tokens,
                "seconds": (s.ended_ns - s.started_ns) / 1e9,
            }
            for s, usd in zip(steps, spent, strict=True)
        ],
        "outside_steps_usd": {"before": _usd(before), "after": _usd(total - before - sum(spent))},
        "machines": [_machine(bill) for bill in bills],
        "price_sources": sorted({b.price_source for b in bills}),
        "notes": _notes(bills),
    }


def _spent_per_step(spending: Spending, steps: Sequence[StepRecord]) -> list[int]:
    """Return micro-dollars per step: differences of a total that never falls, so they are a partition."""
    spent: list[int] = []
    so_far = spending.total_micro_usd(_seconds(steps[0].started_ns)) if steps else 0
    for step in steps:
        until = spending.total_micro_usd(_seconds(step.ended_ns))
        spent.append(until - so_far)
        so_far = until
    return spent


@dataclass(frozen=True, slots=True)
class _Measured:
    """Sums over the steps that carry all three figures, and what the run spent on those steps."""

    tokens: int
    spent_micro_usd: int
    train_busy_s: float
    reserved_tokens: float
    reserved_rollout_s: float
    num_steps: int


def _counterfactual(
    bills: Sequence[MachineBill], steps: Sequence[StepRecord], spent: Sequence[int]
) -> dict[str, object]:
    measured = _measured(steps, spent)
    price = sum(b.price_micro_usd_per_hour for b in bills if b.pool == "reserved")
    reason = _why_unknown(bills, measured, price)
    if reason is not None:
        return {"usd_per_million_tokens": None, "saving_fraction": None, "basis": f"not known: {reason}"}
    rate = measured.reserved_tokens / measured.reserved_rollout_s
    rollout_s = measured.tokens / rate
    cost = cost_micro_usd(price, round((rollout_s + measured.train_busy_s) * _NS_PER_S))
    return {
        "usd_per_million_tokens": _usd_per_million(cost, measured.tokens),
        "saving_fraction": float(1 - Fraction(measured.spent_micro_usd, cost)),
        "basis": (
            f"computed, not run: the {measured.tokens:,} tokens trained in the {measured.num_steps} measured"
            f" steps at the {rate:,.0f} tokens/s that the reserved machine generated alone in its seeding"
            f" windows ({rollout_s:,.1f} s), then the {measured.train_busy_s:,.1f} s of training measured,"
            f" one after the other, at its {format_usd(price, 4)} per hour; compared with the"
            f" {format_usd(measured.spent_micro_usd, 6)} spent on the same steps. Seeding windows see full"
            " batches and no slow tail, which favours the on-demand figure"
        ),
    }


def _measured(steps: Sequence[StepRecord], spent: Sequence[int]) -> _Measured:
    complete = [
        (step, usd)
        for step, usd in zip(steps, spent, strict=True)
        if {"reserved_tokens", "reserved_rollout_s", "train_busy_s"} <= step.metrics.keys()
    ]

    def total(name: str) -> float:
        return sum(step.metrics[name] for step, _ in complete)

    return _Measured(
        tokens=sum(step.tokens for step, _ in complete),
        spent_micro_usd=sum(usd for _, usd in complete),
        train_busy_s=total("train_busy_s"),
        reserved_tokens=total("reserved_tokens"),
        reserved_rollout_s=total("reserved_rollout_s"),
        num_steps=len(complete),
    )


def _why_unknown(bills: Sequence[MachineBill], measured: _Measured, price: int) -> str | None:
    if not any(b.pool == "reserved" for b in bills):
        return "the run has no reserved machine"
    if price == 0:
        return "the reserved machine has no price; set trainer.price_usd_per_hour in the job file"
    if measured.num_steps == 0 or measured.tokens == 0:
        return "no step has measured how fast the reserved machine generates and trains"
    if measured.reserved_tokens <= 0 or measured.reserved_rollout_s <= 0:
        return "the reserved machine generated nothing, so its speed alone was not measured"
    return None


def _machine(bill: MachineBill) -> dict[str, object]:
    return {
        "id": bill.machine,
        "pool": bill.pool,
        "provider": bill.provider,
        "zone": bill.zone,
        "accelerator": bill.accelerator,
        "state": str(bill.state),
        "started_at": None if bill.launched_ns is None else _seconds(bill.launched_ns),
        "ended_at": None if bill.ended_ns is None else _seconds(bill.ended_ns),
        "billed_s": bill.billed_ns / 1e9,
        "price_usd_per_hour": _usd(bill.price_micro_usd_per_hour),
        "price_source": bill.price_source,
        "cost_usd": _usd(bill.cost_micro_usd),
    }


def _notes(bills: Sequence[MachineBill]) -> list[str]:
    notes = []
    if any(b.provider == "local" for b in bills):
        notes.append(
            "prices of local machines are the job file's own (price_usd_per_hour): nobody is charged for them"
        )
    if any(b.state == "intended" for b in bills):
        notes.append("machines whose launch is not confirmed yet are listed at no cost")
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
