"""The core's events on disk: written before any command that follows from them is carried out.

A line per event. A coordinator that died is rebuilt by driving these lines through a new core. The lines
are handed to the kernel at once but not synced: they survive the process, not the loss of the head machine,
after which a run starts again from its checkpoint anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlboost_runtime.core.base.messages import Event
from rlboost_runtime.core.replay import decode_event, encode_event
from rlboost_runtime.seams import Disk


class EventLog:
    """Append-only; one writer."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._path = path
        drop_torn_tail(path)
        self._fd = disk.append(path)

    def append(self, event: Event) -> None:
        """Write one event. Raises `OSError` when the disk refuses; the event then did not happen."""
        size = os.fstat(self._fd).st_size
        try:
            self._disk.write(self._fd, encode_event(event))
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log; a torn last line is not an event."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decode_event(line)


def drop_torn_tail(path: Path) -> None:
    """Cut a last line that a crash left without its end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        block = 4096
        end = size
        while end > 0:
            start = max(0, end - block)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            file.truncate(end)
