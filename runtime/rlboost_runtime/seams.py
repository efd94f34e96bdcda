"""Where our shells touch the world: time, network and disk; tests pass others to turn clocks or break disks.

The network is `Transport`: one connection that carries whole messages.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """Two clocks: `now` for deadlines and leases, `wall` for what people and bills read."""

    def now(self) -> float:
        """Seconds, monotonic, from an arbitrary origin."""

    def wall(self) -> float:
        """Seconds since the Unix epoch."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running event loop."""
        await asyncio.sleep(seconds)


class Backoff:
    """Pauses between attempts: the first up to `first_s`, each twice the one before, none above `longest_s`.

    Each is jittered to between 50 % and 100 % of that, so that many clients do not come back at once.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = self._pause_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause_s, self._pause_s = self._pause_s, min(self._longest_s, 2 * self._pause_s)
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing

    def reset(self) -> None:
        """Start over with the first pause."""
        self._pause_s = self._first_s


class Transport(Protocol):
    """One open connection that carries whole binary messages in order."""

    async def send(self, message: bytes) -> None:
        """Send; waits while the peer does not read. Raises `ConnectionError` once closed."""

    async def receive(self) -> bytes:
        """Return the next message. Raises `ConnectionError` once closed."""

    async def close(self) -> None:
        """Close; idempotent."""


class Disk(Protocol):
    """What the journal and the event log need of a file system."""

    def append(self, path: Path) -> int:
        """Open for appending, creating it with mode 600; return a file descriptor."""

    def write(self, fd: int, data: bytes) -> None:
        """Write all of `data` or raise `OSError`."""

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file to its first `length` bytes, so that the next write continues there."""

    def sync(self, fd: int) -> None:
        """Return once everything written is on stable storage."""

    def close(self, fd: int) -> None:
        """Close the descriptor."""


class SystemDisk:
    """The machine's file system."""

    def append(self, path: Path) -> int:
        """Open `path` for appending."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, fd: int, data: bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file; descriptors of `append` write at its end."""
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        """Call fdatasync, or fsync where there is none."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def close(self, fd: int) -> None:
        """Close the descriptor."""
        os.close(fd)
