"""How a receiver gets a version: whole, or by deltas on one that it has. Pure.

What is compared is money: bytes times what the network takes for them, and seconds times what the machine
costs while it waits. Where neither costs anything, seconds decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

RESTORE_BYTES_PER_S = 1.5e9
"""Of model: reading the base, applying, checking digests; two cores of a small machine, see
benchmarks/weights."""
DEFAULT_BYTES_PER_S = 125e6
"""Taken for the link before anything was pulled over it: 1 Gbit/s."""
LEAST_USD_PER_S = 1e-9
"""What a second costs at least, so that of two ways without a price the faster one is taken."""


class Transfer(StrEnum):
    """What the job says (`weights.transfer`)."""

    AUTO = "auto"
    """Whatever costs less."""
    FULL = "full"
    """Always whole."""
    DELTA = "delta"
    """By deltas whenever there is a base for them."""


@dataclass(frozen=True, slots=True)
class Link:
    """What bytes and seconds cost a receiver."""

    bytes_per_s: float = DEFAULT_BYTES_PER_S
    usd_per_gb: float = 0.0
    """Of egress at the source, 10^9 bytes."""
    usd_per_hour: float = 0.0
    """Of the machine that waits."""


def cost_usd(wire_bytes: int, restored_bytes: int, link: Link) -> float:
    """Return what it costs to fetch `wire_bytes`, and to restore `restored_bytes` of model from a base."""
    seconds = wire_bytes / link.bytes_per_s + restored_bytes / RESTORE_BYTES_PER_S
    return wire_bytes / 1e9 * link.usd_per_gb + seconds * max(LEAST_USD_PER_S, link.usd_per_hour / 3600)


def num_deltas(transfer: Transfer, full_bytes: int, delta_bytes: Sequence[int | None], link: Link) -> int:
    """Return how many deltas to fetch; 0: the version whole.

    `full_bytes`: of the deltas' target; `delta_bytes[i]`: sizes of the first i + 1 deltas together, None
    where there is no base for them here.
    """
    usable = [(size, i + 1) for i, size in enumerate(delta_bytes) if size is not None]
    if transfer is Transfer.FULL or not usable:
        return 0
    best_size, best = min(usable)
    if transfer is Transfer.DELTA:
        return best
    full_usd = cost_usd(full_bytes, 0, link)
    return best if cost_usd(best_size, full_bytes, link) < full_usd else 0
