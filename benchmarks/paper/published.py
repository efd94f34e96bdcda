"""The published figures, each with its source and whether the calibration may see it.

Which are fitted was decided before the others were predicted; `calibration.json` repeats it with the fit's
result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["fitted", "predicted", "repeated"]
"""Repeated: follows from a fitted one, and says nothing new."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number."""

    name: str
    value: float
    role: Role
    source: str


PAPER = "paper"
ARTIFACT = "artifact, REPRODUCE.md"

FIGURES = (
    Figure("8b base tokens/s", 10_000.0, "fitted", ARTIFACT),
    Figure("14b n=1 throughput", 1.37, "fitted", f"{PAPER}, fig. 11"),
    Figure("14b n=6 throughput", 1.37 * 1.64, "fitted", f"{PAPER}, fig. 11"),
    Figure("8b trace throughput", 1.66, "predicted", f"{PAPER}, fig. 10"),
    Figure("14b trace throughput", 1.97, "predicted", f"{PAPER}, fig. 10"),
    Figure("32b trace throughput", 1.51, "predicted", f"{PAPER}, fig. 10"),
    Figure("8b trace tokens per dollar", 1.34, "predicted", f"{PAPER}, fig. 10"),
    Figure("14b trace tokens per dollar", 1.49, "predicted", f"{PAPER}, fig. 10"),
    Figure("32b trace tokens per dollar", 1.28, "predicted", f"{PAPER}, fig. 10"),
    Figure("8b n=1 tokens/s", 12_000.0, "predicted", ARTIFACT),
    Figure("8b n=2 tokens/s", 14_000.0, "predicted", ARTIFACT),
    Figure("8b n=3 tokens/s", 16_000.0, "predicted", ARTIFACT),
    Figure("8b n=4 tokens/s", 18_000.0, "predicted", ARTIFACT),
    Figure("14b 5K n=3 throughput", 1.47, "predicted", f"{PAPER}, fig. 18"),
    Figure("14b 14K n=6 throughput", 2.22, "repeated", f"{PAPER}, fig. 18"),
    Figure("14b 5K n=3 tokens per dollar", 1.24, "predicted", f"{PAPER}, fig. 18"),
    Figure("14b 14K n=6 tokens per dollar", 1.61, "repeated", f"{PAPER}, fig. 18"),
)


def figure(name: str) -> Figure:
    """Return a figure by name. Raises `KeyError`."""
    return next(f for f in FIGURES if f.name == name)
