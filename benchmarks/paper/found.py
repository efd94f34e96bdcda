"""What a simulated figure is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Case = dict[str, Any]
"""One run's figures by name: numbers, and `overheads_s` by name."""


@dataclass(frozen=True, slots=True)
class Found:
    """A simulated figure."""

    value: float
    spread: float = 0.0
    """Standard deviation over runs; 0 for a single one."""
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Check:
    """A share or a change, published and simulated."""

    what: str
    published: float | None
    """None: an experiment of ours."""
    simulated: float
