"""What the same tokens would have cost on demand only: on the reserved machine alone, without spot machines.

One function for the plan, the live view, the cost report and the simulator. They differ in where the seconds
are from, measured or simulated, and `basis` says which. The machine is billed at its own price all the time,
so the hourly rate is never below it.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

from rlboost_runtime.money import MICRO_USD_PER_USD, cost_micro_usd

_NS_PER_S = 1_000_000_000
ALONE_RATE = "reserved_alone_tokens_per_s"
"""Name of a step's metric: tokens per second of the reserved engines over a whole rollout of their own."""


class Counterfactual(msgspec.Struct):
    """What the same tokens would have cost on the reserved machine alone; None where that is not known."""

    usd_per_million_tokens: float | None = None
    saving_fraction: float | None = None
    """Of that; below 0 where the spot machines made the tokens dearer."""
    basis: str = "estimated"
    """How it was computed, or why it is not known."""
    usd_per_hour: float | None = None
    """Price of the reserved machine."""


def on_demand_only(
    *, tokens: int, seconds: float, reserved_micro_usd_per_hour: int, spent_micro_usd: int, basis: str
) -> Counterfactual:
    """Return what `tokens` (> 0) would have cost if the reserved machine alone took `seconds` (> 0) for them.

    `spent_micro_usd`: what they cost with spot machines.
    """
    cost = cost_micro_usd(reserved_micro_usd_per_hour, round(seconds * _NS_PER_S))
    return Counterfactual(
        usd_per_million_tokens=round(cost / tokens, 6),
        saving_fraction=float(1 - Fraction(spent_micro_usd, cost)) if cost else None,
        basis=basis,
        usd_per_hour=reserved_micro_usd_per_hour / MICRO_USD_PER_USD,
    )
