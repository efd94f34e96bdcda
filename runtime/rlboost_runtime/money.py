"""Exact money: integer micro-dollars (1e-6 USD) from integer prices and integer nanoseconds.

Rates may be floats elsewhere; sums and everything here are integers, so that parts add up to their total.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

MICRO_USD_PER_USD = 1_000_000
NS_PER_HOUR = 3_600_000_000_000


def cost_micro_usd(price_micro_usd_per_hour: int, billed_ns: int) -> int:
    """Return what `billed_ns` nanoseconds cost at the price, rounded half up to a micro-dollar.

    Never falls as `billed_ns` grows. Both must be >= 0.
    """
    if price_micro_usd_per_hour < 0 or billed_ns < 0:
        raise ValueError(f"negative price or time: {price_micro_usd_per_hour}, {billed_ns}")
    return (2 * price_micro_usd_per_hour * billed_ns + NS_PER_HOUR) // (2 * NS_PER_HOUR)


def money_places(usd: float) -> int:
    """Return the decimals of the amounts of a run that has cost `usd`: cents, or more below a dollar."""
    return 4 if usd < 1 else 2


def format_usd(micro_usd: int, places: int = 2) -> str:
    """Return dollars for a person, such as `$1,234.57`, rounded half away from zero to `places` (0 to 6)."""
    if not 0 <= places <= 6:
        raise ValueError(f"places is {places}, must be 0 to 6")
    unit = 10 ** (6 - places)
    rounded = (2 * abs(micro_usd) + unit) // (2 * unit)
    whole, rest = divmod(rounded, 10**places)
    sign = "-" if micro_usd < 0 and rounded else ""
    return f"{sign}${whole:,}" + (f".{rest:0{places}d}" if places else "")


def split_exactly(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` (>= 0) in proportion to `weights`; the parts add up to it exactly.

    What rounding down leaves over goes, one each, to the largest remainders, the earlier first. Raises
    `ValueError` where a weight is negative or, unless `total` is 0, all are 0.
    """
    whole = sum(weights)
    if total < 0 or any(w < 0 for w in weights) or (whole == 0 and total != 0):
        raise ValueError(f"cannot split {total} by {list(weights)}")
    if whole == 0:
        return [0] * len(weights)
    parts = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def parse_usd(usd: str | float | Decimal) -> int:
    """Return dollars, such as `"$1,234.56"`, `"8.4"` or 8.4, in micro-dollars, rounded half even.

    A float is taken as the decimal that it prints as. Raises `ValueError` for anything that is no amount.
    """
    text = str(usd).strip().replace("$", "", 1).replace(",", "")
    try:
        return int((Decimal(text) * MICRO_USD_PER_USD).to_integral_value())
    except (ArithmeticError, ValueError) as problem:  # no number, infinite, or not a number
        raise ValueError(f"{usd!r} is not an amount of dollars") from problem
