"""Who has a version's bytes: the head, a peer in the same zone, a bucket; and streams that read from them.

All hand out the same chunks of the same manifest, so that a pull may take any chunk from anybody: a chunk
counts only once its digest is the manifest's. The manifest itself is taken from the head, or from elsewhere
only if it has the content digest that the head announced.

How a receiver gets a version: whole, or by deltas on one that it has. Pure.

What is compared is money: bytes times what the network takes for them, and seconds times what the machine
costs while it waits. Where neither costs anything, seconds decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from rlboost_runtime.weights.pull.range_client import Fill, WeightSource

PEER_CONNECT_S = 2.0
"""A neighbour answers in milliseconds or not at all."""


class Kind(StrEnum):
    """What a holder is."""

    HEAD = "head"
    PEER = "peer"
    """May have a part only, and says which."""
    BUCKET = "bucket"


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """Somebody to pull from.

    `url`: https://HOST:PORT, or s3://BUCKET/PREFIX and the like; `certificate`: PEM text of its server, empty
    for a bucket; `usd_per_gb`: what a GB (10^9) from there to here costs.
    """

    name: str
    kind: Kind
    url: str
    certificate: str = ""
    usd_per_gb: float = 0.0


class Stream(Protocol):
    """Reads from one holder, one request at a time; for one thread.

    Raises `range_client.Unusable` for what may pass, `Absent` where the holder has not the version,
    `Damaged` where it has something else, and an `RLBoostError` for what is final.
    """

    step_bytes: int
    """How many bytes should be asked of a range at once: all that has been asked for comes together."""

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file of at most `max_bytes`."""

    def open_range(self, name: str, start: int, end: int, size: int) -> AbstractContextManager[Fill]:
        """Request bytes [start, end) of a file of `size` bytes; yield what reads them."""

    def abort(self) -> None:
        """Make a thread that waits on this stream fail soon. For other threads."""

    def close(self) -> None:
        """Close; idempotent."""


class VersionSource(Protocol):
    """Where one version is held. May be shared by threads; each takes a `stream` of its own."""

    left_bytes: int | None
    """What is still to pull, which the holder may go by; None: it is not told."""

    def stream(self) -> Stream:
        """Return a new stream; it connects when first used."""


def open_source(holder: Holder, version: int, token: str, idle_s: float, receiver: str = "") -> VersionSource:
    """Return the source of `version` at `holder`. Raises `ProtocolError` on an unusable URL."""
    if holder.kind is Kind.BUCKET:
        from rlboost_runtime.weights.pull.bucket import BucketSource

        return BucketSource(holder.url, version, idle_s)
    connect_s = PEER_CONNECT_S if holder.kind is Kind.PEER else None
    return WeightSource(holder.url, version, token, holder.certificate, idle_s, receiver, connect_s)


RESTORE_BYTES_PER_S = 1.5e9
"""Of model: reading the base, applying, checking digests; two cores of a small machine, see
benchmarks/weights."""
DEFAULT_BYTES_PER_S = 125e6
"""Taken for the link before anything was pulled over it: 1 Gbit/s."""
LEAST_USD_PER_S = 1e-9
"""What a second costs at least, so that of two ways without a price the faster one is taken."""


class TransferSettings(StrEnum):
    """What the job says (`weights.transfer`)."""

    AUTO = "auto"
    """Whatever costs less."""
    FULL = "full"
    """Always whole."""
    DELTA = "delta"
    """By deltas whenever there is a base for them."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What bytes and seconds cost a receiver."""

    bytes_per_s: float = DEFAULT_BYTES_PER_S
    usd_per_gb: float = 0.0
    """Of egress at the source, 10^9 bytes."""
    usd_per_hour: float = 0.0
    """Of the machine that waits."""


def cost_usd(wire_bytes: int, restored_bytes: int, link: LinkCost) -> float:
    """Return what it costs to fetch `wire_bytes`, and to restore `restored_bytes` of model from a base."""
    seconds = wire_bytes / link.bytes_per_s + restored_bytes / RESTORE_BYTES_PER_S
    return wire_bytes / 1e9 * link.usd_per_gb + seconds * max(LEAST_USD_PER_S, link.usd_per_hour / 3600)


def num_deltas(
    transfer: TransferSettings, full_bytes: int, delta_bytes: Sequence[int | None], link: LinkCost
) -> int:
    """Return how many deltas to fetch; 0: the version whole.

    `full_bytes`: of the deltas' target; `delta_bytes[i]`: sizes of the first i + 1 deltas together, None
    where there is no base for them here.
    """
    usable = [(size, i + 1) for i, size in enumerate(delta_bytes) if size is not None]
    if transfer is TransferSettings.FULL or not usable:
        return 0
    best_size, best = min(usable)
    if transfer is TransferSettings.DELTA:
        return best
    full_usd = cost_usd(full_bytes, 0, link)
    return best if cost_usd(best_size, full_bytes, link) < full_usd else 0
