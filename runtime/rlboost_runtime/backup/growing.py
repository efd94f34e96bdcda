"""One file of a run that only grows, and how much of it has been copied.

The file may begin anew: a step's segment is emptied, the event log is cut, metrics are replaced. That is
noticed by its length, its beginning and the bytes before the place up to which it was copied, and begins
another life of the copy. A file that is deleted can still be read to its end: it is kept open.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from rlboost_runtime.backup.layout import PART_BYTES, GrownCopy, part_key

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SAMPLE = 4096
_BLOCK = 1 << 20


class GrowingFile:
    """Copies one file. One thread."""

    def __init__(self, path: Path, name: str, head: int, known: GrownCopy | None = None) -> None:
        """`known`: what a former process copied; it holds if the file still begins like that."""
        self.name = name
        self.is_gone = False
        """True once the file was deleted."""
        self._path = path
        self._head = head
        self._fd: int | None = None
        self._inode = 0
        self._size = self._crc = 0
        self._life = 0
        self._first = self._last = b""
        self._is_other = False
        """True if the file, should there be one again, is not the one that was copied."""
        if known is not None:
            self._size, self._crc, self._life = known.size, known.crc32, known.life
            self._is_other = not self._look() or self._crc_of(known.size) != known.crc32
            if not self._is_other:
                self._first = self._read(0, min(_SAMPLE, known.size))
                start = max(0, known.size - _SAMPLE)
                self._last = self._read(start, known.size - start)

    @property
    def copy(self) -> GrownCopy:
        """What is there."""
        return GrownCopy(self._size, self._crc, self._life)

    @property
    def lag_bytes(self) -> int:
        """Bytes of the file that are not there."""
        return max(0, self.size() - self._size)

    def size(self) -> int:
        """Return the length of the file; of one that was deleted, what it had."""
        if self._look():
            assert self._fd is not None
            return os.fstat(self._fd).st_size
        return self._size

    def advance(self, bucket: ObjectStore, limit: int, budget: int) -> int:
        """Copy up to byte `limit` of the file, `budget` bytes of it or a part more; return how many. Raises
        what the bucket and the disk do."""
        if not self._look():
            return 0
        assert self._fd is not None
        if self._began_anew(os.fstat(self._fd).st_size):
            self._life += 1
            self._size = self._crc = 0
            self._first = self._last = b""
            self._is_other = False
        began = self._size
        while self._size < limit and self._size - began < budget:
            part = self._size // PART_BYTES
            start = part * PART_BYTES
            data = self._read(start, min(limit, start + PART_BYTES) - start)
            if start + len(data) <= self._size:
                break  # it was cut meanwhile
            key = part_key(self._head, self.name, self._life, part)
            obstore.put(bucket, key, data, use_multipart=False)
            self._crc = zlib.crc32(data[self._size - start :], self._crc)
            self._size = start + len(data)
            if part == 0:
                self._first = data[:_SAMPLE]
            self._last = data[-_SAMPLE:]
        return self._size - began

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _look(self) -> bool:
        """Return True if there is a file to read; one that took the place of another is opened."""
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            self.is_gone = True
            return self._fd is not None
        self.is_gone = False
        if self._fd is None or inode != self._inode:
            return self._open()
        return True

    def _open(self) -> bool:
        self.close()
        try:
            self._fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self._inode = os.fstat(self._fd).st_ino
        return True

    def _began_anew(self, size: int) -> bool:
        if self._is_other or size < self._size:
            return True
        place = self._size - len(self._last)
        first = self._read(0, len(self._first))
        return first != self._first or self._read(place, len(self._last)) != self._last

    def _read(self, start: int, length: int) -> bytes:
        assert self._fd is not None
        return os.pread(self._fd, length, start) if length else b""

    def _crc_of(self, size: int) -> int | None:
        crc = at = 0
        while at < size:
            block = self._read(at, min(_BLOCK, size - at))
            if not block:
                return None
            crc = zlib.crc32(block, crc)
            at += len(block)
        return crc
