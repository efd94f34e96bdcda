"""What the run would have cost on its reserved machine alone. Computed from what was measured, not run.

It takes three figures from each step's metrics, where the coordinator put them: `reserved_tokens` (tokens
that the reserved pool generated), `reserved_rollout_s` (seconds during which it was generating) and
`train_busy_s` (training without waiting). Where they are missing the result is null, and `basis` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlboost_runtime.coordinator.accounts import MachineBill
from rlboost_runtime.coordinator.ledger_steps import StepRecord
from rlboost_runtime.core.money import cost_micro_usd, format_usd

_NS_PER_S = 1_000_000_000


def counterfactual(
    bills: Sequence[MachineBill], steps: Sequence[StepRecord], spent: Sequence[int]
) -> dict[str, object]:
    """Return `usd_per_million_tokens`, `saving_fraction` and `basis`; `spent`: micro-dollars per step."""
    measured = _measured(steps, spent)
    price = sum(b.all_micro_usd_per_hour for b in bills if b.pool == "reserved")
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


@dataclass(frozen=True, slots=True)
class _Measured:
    """Sums over the steps that carry all three figures, and what the run spent on those steps."""

    tokens: int
    spent_micro_usd: int
    train_busy_s: float
    reserved_tokens: float
    reserved_rollout_s: float
    num_steps: int


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


def _usd_per_million(micro_usd: int, tokens: int) -> float | None:
    """Micro-dollars per token are dollars per million tokens."""
    return None if tokens == 0 else round(micro_usd / tokens, 6)
