"""Turn a version that is here into a newer one by its deltas, chunk by chunk.

Guarantees: only chunks whose digest is the manifest's are written; what does not come out right, be it for a
wrong base or a damaged delta, is left out and fetched whole. Takes the memory of one chunk per thread.

Versions of a store or of another engine on this very machine: linked into a receiver's folder, no byte
copied.

The files of a version never change, so a hard link is as good as a copy: engines that map it share the pages
that the trainer wrote. It stays what it is when the store deletes the version. A machine's engines take
turns, so that a version travels to a machine once, however many engines it has.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.delta.file import BadDelta, DeltaFile, in_order
from rlboost_runtime.weights.pull.chunk_scheduler import PullProgress
from rlboost_runtime.weights.store.part_folder import PartFolder, Piece, part_folder
from rlboost_runtime.weights.store.store import VersionGone, WeightStore

MAX_THREADS = 8


class _Memory(threading.local):
    """One chunk per thread, kept from chunk to chunk."""

    def __init__(self) -> None:
        self.data = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> memoryview:
        if self.data.size < num_bytes:
            self.data = np.empty(num_bytes, np.uint8)
        return self.data.data[:num_bytes]


_memory = _Memory()


def restore(
    part: PartFolder, base: Path, deltas: Sequence[Path], pieces: Sequence[Piece], progress: PullProgress
) -> int:
    """Write those of `pieces` that come out right; return how many bytes that was.

    `base`: the older file; `deltas`: the oldest first; `pieces`: all of one file. Raises `RuntimeFault` where
    the disk is full.
    """
    with ExitStack() as stack:
        try:
            chain = [stack.enter_context(DeltaFile(path)) for path in deltas]
            fd = os.open(base, os.O_RDONLY)
        except (BadDelta, OSError):
            return 0
        stack.callback(os.close, fd)
        if not pieces or any(_does_not_fit(delta, pieces[0]) for delta in chain):
            return 0
        first = next(i for i, chunk in enumerate(pieces[0].file.chunks) if chunk == pieces[0].chunk)
        start = pieces[0].index - first

        def one(piece: Piece) -> int:
            return piece.chunk.length if _restored(part, fd, chain, piece, piece.index - start) else 0

        before = progress.done_bytes
        for restored in in_order(one, pieces, min(os.cpu_count() or 1, MAX_THREADS)):
            progress.done_bytes += restored
            progress.moved_bytes += pieces[0].chunk.length
        return progress.done_bytes - before


def _does_not_fit(delta: DeltaFile, piece: Piece) -> bool:
    return delta.size != piece.file.size or delta.num_chunks != len(piece.file.chunks)


def _restored(part: PartFolder, fd: int, chain: Sequence[DeltaFile], piece: Piece, index: int) -> bool:
    data = _memory.of(piece.chunk.length)
    try:
        if os.preadv(fd, [data], piece.chunk.offset) != piece.chunk.length:
            return False
        for delta in chain:
            delta.apply(index, data)
    except BadDelta:
        return False
    except OSError as exc:
        raise RuntimeFault(f"the base cannot be read: {exc.strerror}", "check the machine's disk") from exc
    if manifests.digest(data) != piece.chunk.blake3:
        return False
    part.write(piece, data)
    return True


LOOK_S = 0.1
"""How often an engine that waits for its turn looks whether it has come."""


def link_version(store: Path, version: int, folder: Path, digest: str) -> Path | None:
    """Link `version` into `folder` and return where it lies there; None where that cannot be done.

    `store`: Path() or a folder that is not here: there is none on this machine; `digest`: the content digest
    it must have, empty where that is not known. Raises `RuntimeFault` on a full disk.
    """
    if store == Path() or not store.is_dir():
        return None
    try:
        with WeightStore(store).read(version) as lease:
            manifest = manifests.read_manifest(lease.folder)
            if digest not in ("", manifest.content_digest):
                return None
            with part_folder(folder, manifest) as part:
                return part.adopt(lease.folder)
    except (VersionGone, ProtocolError):
        return None


def link_sibling(siblings: Sequence[Path], version: int, folder: Path, digest: str) -> Path | None:
    """Link `version` from the folder of another engine that has it whole, as `link_version` does."""
    for sibling in siblings:
        source = sibling / manifests.version_name(version)
        try:
            manifest = manifests.read_manifest(source)
        except ProtocolError:
            continue
        if digest in ("", manifest.content_digest):
            with part_folder(folder, manifest) as part:
                linked = part.adopt(source)
            if linked is not None:
                return linked
    return None


@contextmanager
def turn(machine: Path, progress: PullProgress) -> Iterator[None]:
    """Wait until no other engine of `machine`, a folder that all of them have, is pulling.

    Whoever pulls has a deadline of its own, and a process that ends gives its turn back: so to wait is to
    make progress.
    """
    with (machine / ".turn").open("ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.verified(1)
                time.sleep(LOOK_S)
        yield
