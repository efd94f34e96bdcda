"""Where a version's bytes come from: another folder of this machine, the head, a peer in the zone, a bucket.

All sources hand out the same chunks of the same manifest, so that a pull may take any chunk from any of them:
a chunk counts only once its digest is the manifest's. The manifest itself is taken from the head, or from
elsewhere only if it has the content digest that the head announced.

On this machine a version is linked, no byte copied: its files never change, so a hard link is as good as a
copy. Engines that map it share the pages that the trainer wrote, and it stays when the store deletes the
version. A machine's engines take turns, so that a version travels to a machine once, however many engines it
has.

Over the network it comes whole or by deltas, whichever costs less (`num_deltas`): bytes times the price of
egress, and seconds times the price of the machine that waits. Where neither costs anything, seconds decide.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.logs import event
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.child_pipe import (
    DEFAULT_BYTES_PER_S,
    PullProgress,
    PullSource,
    SourceKind,
    TransferSettings,
)
from rlboost_runtime.weights.pull.range_client import RangeStream, WeightSource
from rlboost_runtime.weights.store.part_folder import part_folder
from rlboost_runtime.weights.store.store import VersionGone, WeightStore

if TYPE_CHECKING:
    from rlboost_runtime.weights.pull.bucket import BucketSource, BucketStream

log = logging.getLogger(__name__)

PEER_CONNECT_S = 2.0
"""A neighbour answers in milliseconds or not at all."""


Stream: TypeAlias = "RangeStream | BucketStream"
"""Reads from one source, one request at a time; for one thread. Raises `range_client.Unusable` for what may
pass, `Absent` where the source does not have the version, `Damaged` where it has something else, and an
`RLBoostError` for what is final."""
VersionSource: TypeAlias = "WeightSource | BucketSource"
"""One version at one source. May be shared by threads; each takes a `stream` of its own."""


def open_source(
    source: PullSource, version: int, token: str, idle_s: float, receiver: str = ""
) -> VersionSource:
    """Open `version` at a source. Raises `ProtocolError` on an unusable URL."""
    if source.kind is SourceKind.BUCKET:
        from rlboost_runtime.weights.pull.bucket import BucketSource

        return BucketSource(source.url, version, idle_s)
    connect_s = PEER_CONNECT_S if source.kind is SourceKind.PEER else None
    token = source.token if source.kind is SourceKind.PEER else token
    return WeightSource(source.url, version, token, source.certificate, idle_s, receiver, connect_s)


RESTORE_BYTES_PER_S = 1.5e9
"""Of model: reading the base, applying, checking digests; two cores of a small machine, see
benchmarks/weights."""
LEAST_USD_PER_S = 1e-9
"""What a second costs at least, so that of two ways without a price the faster one is taken."""


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


POLL_S = 0.1
"""How often an engine that waits for its turn tries to take it."""


def link_version(store: Path, version: int, folder: Path, digest: str) -> Path | None:
    """Link `version` into `folder` and return where it lies there; None where that cannot be done.

    `store`: Path() or a folder that is not here: there is none on this machine; `digest`: the content digest
    it must have, empty where that is not known. Raises `RuntimeFault` on a full disk.
    """
    if store == Path() or not store.is_dir():
        return None
    try:
        with WeightStore(store).read(version) as hold:
            return _adopt(hold.folder, folder, digest)
    except (VersionGone, ProtocolError):
        return None


def link_sibling(siblings: Sequence[Path], version: int, folder: Path, digest: str) -> Path | None:
    """Link `version` from the folder of another engine that has it whole, as `link_version` does."""
    for sibling in siblings:
        with suppress(ProtocolError):
            linked = _adopt(sibling / manifests.version_name(version), folder, digest)
            if linked is not None:
                return linked
    return None


def _adopt(source: Path, folder: Path, digest: str) -> Path | None:
    manifest = manifests.read_manifest(source)
    if digest not in ("", manifest.content_digest):
        return None
    problem = manifests.damage(source, manifest, has_all_deltas=False)
    if problem is not None:  # as a receiver over the network would find
        event(log, "weights.damaged", level=logging.ERROR, problem=problem)
        return None
    with part_folder(folder, manifest) as part:
        return part.adopt(source)


@contextmanager
def turn(machine: Path, progress: PullProgress) -> Iterator[None]:
    """Wait until no other engine of `machine`, a folder that all of them have, is pulling.

    Every pull has a deadline of its own, and a process that ends gives its turn back, so waiting counts as
    progress.
    """
    with (machine / ".turn").open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.verified(1)
                time.sleep(POLL_S)
        yield
