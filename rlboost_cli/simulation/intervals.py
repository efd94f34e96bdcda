"""Means over seeds with the interval that they lie in: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the last is used, which makes
# the interval a little too wide
_T = (
    *(
        12.706,
        4.303,
        3.182,
        2.776,
        2.571,
        2.447,
        2.365,
        2.306,
        2.262,
        2.228,
        2.201,
        2.179,
        2.160,
        2.145,
        2.131,
    ),
    *(
        2.120,
        2.110,
        2.101,
        2.093,
        2.086,
        2.080,
        2.074,
        2.069,
        2.064,
        2.060,
        2.056,
        2.052,
        2.048,
        2.045,
        2.042,
    ),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95 % interval (Student's t); None for a single value."""

    mean: float
    half_width: float | None

    def text(self, places: int = 0) -> str:
        """Return it as people write it: `12,345 ±67`."""
        spread = "" if self.half_width is None else f" ±{self.half_width:,.{places}f}"
        return f"{self.mean:,.{places}f}{spread}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values`, one per seed. Raises `ValueError` where there are none."""
    if not values:
        raise ValueError("no values to take the mean of")
    if len(values) == 1:
        return Estimate(float(values[0]), None)
    quantile = _T[min(len(values) - 1, len(_T)) - 1]
    return Estimate(fmean(values), quantile * stdev(values) / sqrt(len(values)))
