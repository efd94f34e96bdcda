"""A disk that fills up, and loses in a power cut what was not synced; a journal that needs no thread.

Files are real, and small: what is read at a restart is what was written.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace

from rlboost_runtime.coordinator.storage.journal import GATHER_S, RETRY_S, Journal
from rlboost_runtime.seams import SystemDisk

SYNC_S = (0.0005, 0.02)


class PlayedDisk(SystemDisk):
    """One process's view of the head's disk."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._paths: dict[int, Path] = {}
        self._synced: dict[Path, int] = {}
        self.is_full = False

    def append(self, path: Path) -> int:
        """Open; what it held before is safe."""
        fd = super().append(path)
        self._paths[fd] = path
        self._synced.setdefault(path, os.fstat(fd).st_size)
        return fd

    def write(self, fd: int, data: bytes) -> None:
        """Write all of it, or on a full disk a part."""
        if self.is_full:
            super().write(fd, data[: self._random.randrange(len(data) + 1)])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file."""
        super().truncate(fd, length)
        path = self._paths[fd]
        self._synced[path] = min(self._synced[path], length)

    def sync(self, fd: int) -> None:
        """What is written is safe from now on."""
        self._synced[self._paths[fd]] = os.fstat(fd).st_size

    def sync_s(self) -> float:
        """How long the next sync takes."""
        return self._random.uniform(*SYNC_S)

    def cut_power(self) -> None:
        """Take away the ends of files that were not synced: all of each, or a random part."""
        for path, synced in self._synced.items():
            if path.exists() and path.stat().st_size > synced:
                os.truncate(path, self._random.randint(synced, path.stat().st_size))


class InlineJournal(Journal):
    """The journal with its writer on the event loop: what the thread waits for takes virtual time."""

    _is_due = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write what was appended before."""
        self._loop = loop
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write_in(0.0)

    def drop_before(self, step: int) -> None:
        """Delete the segments of earlier steps."""
        super().drop_before(step)
        self._write_in(GATHER_S)

    async def close(self) -> None:
        """Write what is queued."""
        if not self._shared.closing:
            await self.flushed()
            self._shared.closing = True

    def _put(self, item: object) -> None:
        super()._put(item)  # type: ignore[arg-type]
        self._write_in(GATHER_S)

    def _write_in(self, seconds: float) -> None:
        if self._loop is not None and not self._is_due:
            self._is_due = True
            self._loop.call_later(seconds, self._write)

    def _write(self) -> None:
        self._is_due = False
        if not (self._shared.queue or self._shared.drop_before is not None):
            return
        batch, drop_before, _ = self._next_batch()
        try:
            self._drop_segments(drop_before)
            self._commit(batch)
        except OSError as error:
            self._report(f"journal: {error.strerror or error} ({self._folder})")
            self._write_in(RETRY_S)
            return
        self._report(None)
        self._done(batch)
        if self._shared.queue:
            self._write_in(0.0)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        assert isinstance(self._disk, PlayedDisk)
        self._loop.call_later(self._disk.sync_s(), callback)


class _AtOnce:
    """A thread that has ended as soon as it was started."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...] = (), **_: object) -> None:
        self._target, self._arguments = target, args

    def start(self) -> None:
        """Do all of its work."""
        self._target(*self._arguments)

    def is_alive(self) -> bool:
        """It has ended."""
        return False

    def join(self) -> None:
        """It has ended."""


AT_ONCE = SimpleNamespace(Thread=_AtOnce)
"""Takes the place of `threading` where a module writes a file in a thread."""
