"""Turn a version that is here into a newer one by its deltas, chunk by chunk.

Guarantees: only chunks whose digest is the manifest's are written; what does not come out right, because
of a wrong base or a damaged delta, is left out and fetched whole. Takes the memory of one chunk per thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.child_pipe import PullProgress
from rlboost_runtime.weights.delta.file import BadDelta, DeltaFile, in_order
from rlboost_runtime.weights.store.part_folder import PartFolder, Piece

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
    """Write those of `pieces` that come out right; return how many bytes they have.

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
