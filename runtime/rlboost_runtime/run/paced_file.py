"""Large files that are written beside the journal of tokens, on the same disk.

An acknowledgement of tokens waits for the disk, behind whatever was handed to the disk before. So a large
file is handed over in pieces that take the disk a millisecond each, one at a time for all processes that
name the same `turn`, and a little slower than the disk can take them (`Pace`): a disk at its limit makes
everybody wait. Pieces are written out without a commit of the file system's own journal (`sync_file_range` on
blocks that are reserved before), since such a commit holds other syncs up: there is one at the end. On a
tmpfs all of this costs next to nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_BYTES, MOST_BYTES = 1 << 14, 32 << 20
"""Bytes of a file that are handed to the disk at a time: at least and at most."""
FIRST_BYTES = 1 << 18
PIECE_S = 0.001
"""Seconds that they take, between these bounds."""
LOOK_S, LOOK_EVERY_S = 1.0, 600.0
"""Every so often, and first of all, a disk is written to as fast as it can for so long. Acknowledgements are
slow meanwhile, so it is for much less than 1 % of the time."""
LOOK_AGAIN_S = 60.0
"""The same after a disk became slower, and twice as long each time that it stays so."""
LOOKS = 3
"""The best of so many counts: what others did meanwhile does not slow a writer down for long."""
BELOW = 0.85
"""The rate in between, as a share of what the disk took."""
AT_ITS_LIMIT = 0.97
"""A disk that takes this share of `LOOK_S` for what is to take `BELOW` of it has become slower: that counts
as a look."""
RESERVED_BYTES = 256 << 20
"""Of a file that grows, reserved at a time."""
_WRITE_AND_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


class Pace:
    """The rate at which a disk is written to: a little less than it was seen to take. The caller measures and
    pauses."""

    def __init__(self) -> None:
        self.piece_bytes = FIRST_BYTES
        """Bytes to hand over next; few before the disk is known: one with a limit takes a burst at once,
        and everybody else waits."""
        self._seen: deque[float] = deque(maxlen=LOOKS)
        self._look = _Look()
        self._looked_at = -math.inf
        self._look_every_s = LOOK_EVERY_S

    def wrote(self, num_bytes: int, took_s: float, now: float) -> float:
        """Note that the disk took so many bytes in `took_s`; return for how many seconds to pause."""
        is_looking = now - self._looked_at >= self._look_every_s
        if is_looking and not self._look.is_at_full_speed:
            self._look = _Look(is_at_full_speed=True)
        pause_s = 0.0 if is_looking else max(0.0, num_bytes / (BELOW * max(self._seen)) - took_s)
        look = self._look
        look.num_bytes += num_bytes
        look.busy_s += took_s
        look.pause_s += pause_s
        if look.busy_s + look.pause_s >= LOOK_S:
            if look.busy_s >= AT_ITS_LIMIT * (look.busy_s + look.pause_s):
                self._saw(look.num_bytes / look.busy_s, now)
            self._look = _Look()
        return pause_s

    def _saw(self, bytes_per_s: float, now: float) -> None:
        before = max(self._seen, default=0.0)
        self._seen.append(bytes_per_s)
        if max(self._seen) < AT_ITS_LIMIT * before:
            self._look_every_s = LOOK_AGAIN_S
        elif self._look.is_at_full_speed:
            self._look_every_s = min(LOOK_EVERY_S, 2 * self._look_every_s)
        self._looked_at = now
        self.piece_bytes = min(MOST_BYTES, max(LEAST_BYTES, int(PIECE_S * max(self._seen))))


@dataclass(slots=True)
class _Look:
    """What a disk has taken lately, for how long it was busy with it, and for how long it was left alone."""

    num_bytes: int = 0
    busy_s: float = 0.0
    pause_s: float = 0.0
    is_at_full_speed: bool = False
    """Nothing is paused for."""


_paces: dict[int, Pace] = {}
"""By device, for this process."""


class PacedFile(io.RawIOBase):
    """A new file, durable once it is closed. For one thread."""

    def __init__(self, path: Path, turn: Path | None = None) -> None:
        """`turn`: a folder that writers to this disk lock (flock), so that one writes at a time."""
        super().__init__()
        self._file = path.open("wb", buffering=0)
        self._turn = None if turn is None else os.open(turn, os.O_RDONLY)
        self._pace = _paces.setdefault(os.fstat(self._file.fileno()).st_dev, Pace())
        self._written = self._synced = self._reserved = 0

    def write(self, data: Any) -> int:  # a buffer
        """Write all of it, at the disk's pace."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            piece = view[start : start + self._pace.piece_bytes - (self._written - self._synced)]
            start += len(piece)
            self._reserve(len(piece))
            self.write_piece(piece)
            self._written += len(piece)
            if self._written - self._synced >= self._pace.piece_bytes:
                self._hand_over()
        return len(view)

    def write_piece(self, piece: memoryview) -> None:
        """Write bytes that are at most what the disk takes in `PIECE_S`."""
        while piece:
            piece = piece[self._file.write(piece) :]

    def _reserve(self, num_bytes: int) -> None:
        if self._written + num_bytes > self._reserved and sys.platform == "linux":
            size = max(RESERVED_BYTES, num_bytes)
            result = _LIBC.fallocate(self.fileno(), _KEEP_SIZE, ctypes.c_int64(self._reserved),
                                     ctypes.c_int64(size))  # fmt: skip
            self._reserved = self._reserved + size if result == 0 else sys.maxsize  # it cannot, or is full

    def _hand_over(self) -> None:
        """Write the newest piece out, at the disk's pace."""
        size = self._written - self._synced
        if not size:
            return
        with self._in_turn():
            began = time.monotonic()
            _write_out(self.fileno(), self._synced, size)
            now = time.monotonic()
            time.sleep(self._pace.wrote(size, now - began, now))
        self._synced = self._written

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Wait until no other writer writes, and keep them from it."""
        if self._turn is not None:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if self._turn is not None:
                fcntl.flock(self._turn, fcntl.LOCK_UN)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._file.tell()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Bring all of it to the disk; idempotent."""
        if not self._file.closed:
            try:
                if 0 < self._reserved < sys.maxsize:
                    os.ftruncate(self.fileno(), self._written)  # gives back what was reserved beyond the end
                self._hand_over()
                with self._in_turn():
                    os.fdatasync(self.fileno())
            finally:
                self._file.close()
                if self._turn is not None:
                    os.close(self._turn)
        super().close()


def _write_out(fd: int, start: int, num_bytes: int) -> None:
    """Return once these bytes of a file are on the disk, though the file system may not know it yet."""
    if sys.platform == "linux":
        start_, size = ctypes.c_int64(start), ctypes.c_int64(num_bytes)
        if _LIBC.sync_file_range(fd, start_, size, ctypes.c_uint(_WRITE_AND_WAIT)) == 0:
            return
    os.fdatasync(fd)
