"""The token journal: an append-only segment file per step, written by a thread of its own.

Guarantees:

- a record's callback runs only once the record, and all appended before it, are on stable storage;
  callbacks run in append order on the event loop;
- a segment holds whole records in append order. Readers stop before the first record that is torn or damaged
  and say which it is; it and what follows is cut off before the segment is appended to again;
- a full or failing disk loses and acknowledges nothing: the writer cuts the segment back to its last good
  length, reports the problem once, and tries again each second until it works.

Group commit: the writer takes everything that is queued, writes it at once and syncs once.

A segment: `MAGIC`, then records: u32 length (> 0), u32 crc32, u64 mark, the bytes; little-endian. The crc32
is over length, mark, the record's place in the file, and the bytes. The mark is the length of the event log
when the record was appended: an event log that is shorter has lost its end. Segments of older versions have
neither magic nor marks, and the crc32 of the bytes alone; they are read, and appended to, as they are.

Beside it the core's events, a line of JSON each, written before any command that follows from them is carried
out (`EventLog`). A coordinator that died is rebuilt by driving these lines through a new core. A line begins
with the crc32 of its place in the file and of the rest of the line; lines of older versions have none. Lines
are handed to the kernel at once but not synced: they survive the process; a power cut takes the last seconds
of them (30 with Linux's defaults), which `CoreDriver` notices by the marks or by the machine's boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, get_args

import msgspec

from rlboost_runtime.core.base.messages import Command, Event, Heartbeat
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import sync_path
from rlboost_runtime.seams import Disk

_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)} | {"Beat": Heartbeat}
"""By the name in the log; earlier versions logged a heartbeat as `Beat`."""


def encode_event(event: Event) -> bytes:
    """Return the event as one line of JSON, newline included; `decode_event` returns it exactly."""
    return _line("event", event)


def encode_command(command: Command) -> bytes:
    """Return the command as one line of JSON, newline included."""
    return _line("command", command)


def decode_event(line: bytes | str) -> Event:
    """Return the event on a line. Raises `ValueError` for anything else.

    Unknown keys are ignored and missing ones take their default, so that a log of an older version can be
    read.
    """
    text = line.decode() if isinstance(line, bytes) else line  # of bytes json guesses the coding
    try:
        plain = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested too deeply: {line[:200]!r}") from None
    if not isinstance(plain, dict) or not isinstance(plain.get("event"), str):
        raise ValueError(f"not an event: {line[:200]!r}")
    kind = _EVENTS.get(plain["event"])
    if kind is None:
        raise ValueError(f"unknown event {plain['event']!r}")
    return msgspec.convert(plain, kind, strict=False)


def _line(key: str, message: Event | Command) -> bytes:
    plain = {key: type(message).__name__, **msgspec.to_builtins(message)}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


GATHER_S = 0.01
"""Longest time between two commits while records come: they gather in it."""
SHARE = 0.2
"""The pause after a commit makes its cost (thread switches, a sync) this share of the time. A record that
comes later is committed at once."""
RETRY_S = 1.0
"""Pause before the disk is tried again."""
MAX_BATCH_BYTES = 16 * 1024 * 1024
"""Most bytes written under one sync, so that a backlog does not hold its first acknowledgements back."""

MAX_OPEN_SEGMENTS = 4
"""Segments that stay open; one that was closed is read to its end before more is appended."""

MAGIC = b"\0\0\0\0RLJ2"
"""Begins a segment; a record of an older version cannot begin with a length of 0."""
_HEADER = struct.Struct("<IIQ")
_OLD_HEADER = struct.Struct("<II")
_PLACE = struct.Struct("<IQQ")  # what a record's crc32 begins with: length, mark, place

Callback = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Item:
    """One thing for the writer to do: append `record` (if any) to the segment of `step`. With `opens`, open
    the segment anew, whatever is open; with `fresh`, empty it then."""

    step: int
    record: bytes = b""
    on_commit: Callback | None = None
    mark: int = 0
    opens: bool = False
    fresh: bool = False


@dataclass(slots=True)
class _Segment:
    """An open segment. `good_bytes`: length up to which it holds whole records; with `torn` there may be
    something behind them, which must go before anything is written. `is_old`: of an older version."""

    opened_by: _Item
    fd: int
    good_bytes: int
    is_old: bool
    torn: bool = True

    def serves(self, item: _Item) -> bool:
        """Return whether `item` may be written here."""
        return self.opened_by is item or (self.opened_by.step == item.step and not item.opens)


@dataclass(slots=True)
class _Shared:
    """What the event loop and the writer share, all under `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queue: deque[_Item] = field(default_factory=deque)
    pending_bytes: int = 0
    drop_before: int | None = None
    closing: bool = False


class Journal:
    """Appends records to the segments in one folder. All methods are for the event loop's thread."""

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        on_problem: Callable[[str | None], None],
        mark: Callable[[], int] = lambda: 0,
    ) -> None:
        """`on_problem` runs on the event loop: a problem when writing fails, None when it works again. `mark`
        gives the length of the event log."""
        self._folder = folder
        self._mark = mark
        self._disk = disk
        self._on_problem = on_problem
        self._step = 0
        self._shared = _Shared()
        self._committed: deque[Callback] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._segments: dict[int, _Segment] = {}  # the writer's
        self._due_at = 0.0  # likewise
        self._problem: str | None = None  # the writer's

    @property
    def pending_bytes(self) -> int:
        """Bytes of records that are not on stable storage yet; agents bound what they owe."""
        return self._shared.pending_bytes

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the writer; callbacks will run on `loop`. What was appended before is written now."""
        if self._thread is not None:
            raise RuntimeError("the journal has been started before")
        self._loop = loop
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._write_until_closed, name="journal")
        self._thread.start()

    def open_step(self, step: int, *, fresh: bool = False) -> None:
        """Let following appends go to the segment of `step`: after what it holds or, if `fresh`, instead."""
        self._step = step
        self._put(_Item(step, opens=True, fresh=fresh))

    def append(self, record: bytes, on_commit: Callback | None = None, step: int | None = None) -> None:
        """Queue a record for the segment of the step that was opened last, or of an earlier `step`. An empty
        one writes nothing; its callback still runs in its turn."""
        self._put(_Item(self._step if step is None else step, record, on_commit, self._mark()))

    def drop_before(self, step: int) -> None:
        """Delete the segments of earlier steps. What is queued for them is not written; its callbacks run."""
        shared = self._shared
        with shared.changed:
            for index, item in enumerate(shared.queue):
                if item.step < step:
                    shared.pending_bytes -= len(item.record)
                    shared.queue[index] = _Item(item.step, on_commit=item.on_commit)
            shared.drop_before = max(step, shared.drop_before or step)
            shared.changed.notify()

    async def flushed(self) -> None:
        """Return once everything appended so far is on stable storage and its callbacks have run."""
        if self._shared.closing:
            raise RuntimeError("the journal is closed")
        done = asyncio.get_running_loop().create_future()
        self.append(b"", lambda: None if done.done() else done.set_result(None))
        await done

    async def close(self) -> None:
        """Write what is queued, run its callbacks and end the thread; idempotent.

        Raises `RuntimeFault` when the disk still refuses: what was not written was not acknowledged either.
        """
        with self._shared.changed:
            self._shared.closing = True
            self._shared.changed.notify()
        if self._thread is None:
            return
        await asyncio.to_thread(self._thread.join)
        self._deliver()
        if self._shared.queue:
            raise RuntimeFault(
                f"{self._problem}; {self._shared.pending_bytes} bytes were not written",
                f"free space for {self._folder} and start the coordinator again: agents send them again",
            )

    @staticmethod
    def read(folder: Path, step: int) -> SegmentReader:
        """Return the records of a step's segment, one by one; none without a segment."""
        return SegmentReader(segment_path(folder, step))

    def _put(self, item: _Item) -> None:
        with self._shared.changed:
            self._shared.queue.append(item)
            self._shared.pending_bytes += len(item.record)
            if len(self._shared.queue) == 1:  # otherwise the writer is awake
                self._shared.changed.notify()

    def _deliver(self) -> None:
        """Run the callbacks of what is committed; one that raises does not keep later ones from running."""
        try:
            while self._committed:
                self._committed.popleft()()
        finally:
            if self._committed:
                assert self._loop is not None
                self._loop.call_soon(self._deliver)

    # --- the writer's thread -----------------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        while True:
            batch, drop_before, closing = self._next_batch()
            try:
                self._drop_segments(drop_before)
                self._commit(batch)
            except OSError as error:
                self._report(f"journal: {error.strerror or error} ({self._folder})")
                if closing:
                    break
                self._pause()
                continue
            self._report(None)
            if self._done(batch):
                break
        for step in list(self._segments):
            self._close_segment(step)

    def _next_batch(self) -> tuple[list[_Item], int | None, bool]:
        """Wait for something to do. Return a batch for one segment, which stays at the head of the queue
        until it is committed; the step before which segments are to be deleted; whether this is the end."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.queue or shared.drop_before is not None or shared.closing)
            due_s = self._due_at - time.monotonic()
            if self._problem is None and not shared.closing and due_s > 0:
                shared.changed.wait_for(lambda: shared.closing, timeout=due_s)
            batch: list[_Item] = []
            num_bytes = 0
            for item in shared.queue:
                num_bytes += len(item.record)
                if batch and (item.opens or item.step != batch[0].step or num_bytes > MAX_BATCH_BYTES):
                    break
                batch.append(item)
            return batch, shared.drop_before, shared.closing

    def _commit(self, batch: list[_Item]) -> None:
        """Write the batch's records with one write and one sync, all or nothing."""
        if not any(item.record or item.opens for item in batch):
            return
        segment = self._segments.get(batch[0].step)
        if segment is None or not segment.serves(batch[0]):
            segment = self._open_segment(batch[0])
        if segment.torn:
            self._disk.truncate(segment.fd, segment.good_bytes)
        segment.torn = True
        data = _framed(batch, segment.good_bytes, is_old=segment.is_old)
        began = time.monotonic()
        self._disk.write(segment.fd, data)
        self._disk.sync(segment.fd)
        segment.good_bytes += len(data)
        segment.torn = False
        now = time.monotonic()
        self._due_at = now + min(GATHER_S, (now - began) / SHARE)

    def _done(self, batch: list[_Item]) -> bool:
        """Take the batch off the queue and let its callbacks run; return whether all is done for good."""
        shared = self._shared
        with shared.changed:
            for _ in batch:
                shared.pending_bytes -= len(shared.queue.popleft().record)
            finished = shared.closing and not shared.queue
        callbacks = [item.on_commit for item in batch if item.on_commit is not None]
        if callbacks:
            self._committed.extend(callbacks)
            self._call_soon(self._deliver)
        return finished

    def _pause(self) -> None:
        """Wait before the next attempt; a drop, which may free space, or the end cuts it short."""
        shared = self._shared
        with shared.changed:
            asked_before = shared.drop_before
            shared.changed.wait_for(
                lambda: shared.closing or shared.drop_before != asked_before, timeout=RETRY_S
            )

    def _report(self, problem: str | None) -> None:
        """Pass on that writing fails, once, or that it works again."""
        if (problem is None) == (self._problem is None):
            return
        self._problem = problem
        self._call_soon(lambda: self._on_problem(problem))

    def _call_soon(self, callback: Callback) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)

    # --- segments ----------------------------------------------------------------------------------------

    def _open_segment(self, item: _Item) -> _Segment:
        self._close_segment(item.step)
        while len(self._segments) >= MAX_OPEN_SEGMENTS:
            self._close_segment(next(iter(self._segments)))
        found = Journal.read(self._folder, item.step)
        if not item.fresh:
            deque(found, maxlen=0)  # to its end, or to where it is damaged
        fd = self._disk.append(segment_path(self._folder, item.step))
        segment = self._segments[item.step] = _Segment(item, fd, found.good_bytes, found.is_old)
        sync_path(self._folder)  # so that the file's name survives a power cut, too
        return segment

    def _close_segment(self, step: int) -> None:
        segment = self._segments.pop(step, None)
        if segment is not None:
            with contextlib.suppress(OSError):  # everything that was acknowledged has been synced
                self._disk.close(segment.fd)

    def _drop_segments(self, before: int | None) -> None:
        if before is None:
            return
        for step in [step for step in self._segments if step < before]:
            self._close_segment(step)
        for path in self._folder.glob("step-*.seg"):
            if int(path.stem.removeprefix("step-")) < before:
                path.unlink(missing_ok=True)
        with self._shared.changed:
            if self._shared.drop_before == before:
                self._shared.drop_before = None


def segment_path(folder: Path, step: int) -> Path:
    """Return where the segment of `step` lies."""
    return folder / f"step-{step:06d}.seg"


def _framed(batch: list[_Item], place: int, *, is_old: bool) -> bytes:
    """Return the batch's records as they are written from `place` on."""
    parts = [] if place or is_old else [MAGIC]
    place = place or len(MAGIC)
    for item in batch:
        if not item.record:
            continue
        length = len(item.record)
        if is_old:
            header = _OLD_HEADER.pack(length, zlib.crc32(item.record))
        else:
            header = _HEADER.pack(length, _crc(item.record, item.mark, place), item.mark)
        parts += (header, item.record)
        place += len(header) + length
    return b"".join(parts)


def _crc(record: bytes, mark: int, place: int) -> int:
    return zlib.crc32(record, zlib.crc32(_PLACE.pack(len(record), mark, place)))


class SegmentReader:
    """Iterates over the records of a segment, up to its end or to the first that is torn or damaged.

    What it tells is right once it has been read to its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good_bytes = 0
        """Length of the magic and the whole records read so far."""
        self.is_old = False
        self.mark = 0
        """Length of the event log when the last record was appended."""
        self.problem = ""
        """Why reading ended before the end of the file, in words."""
        self.is_torn = False
        """Such an end is what a crash leaves that interrupts a write."""
        self._num_read = 0
        self._records = self._read()

    def __iter__(self) -> Iterator[bytes]:
        return self._records

    def _read(self) -> Iterator[bytes]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(MAGIC))
            if start == MAGIC:
                self.good_bytes = len(MAGIC)
            else:
                self.is_old = any(start[:4])
                file.seek(0)
            while self.good_bytes < size:
                record = self._next(file, size) if self.is_old or self.good_bytes else None
                if record is None:
                    file.seek(self.good_bytes)
                    self._explain(size, file.read(4096))
                    return
                self._num_read += 1
                yield record
        self.is_old = self.is_old and self.good_bytes > 0

    def _next(self, file: BinaryIO, size: int) -> bytes | None:
        """Return the next record, None where it is torn or damaged."""
        layout = _OLD_HEADER if self.is_old else _HEADER
        header = file.read(layout.size)
        if len(header) < layout.size:
            return None
        length, crc, *marks = layout.unpack(header)
        if not 0 < length <= size - file.tell():
            return None
        record = file.read(length)
        mark = marks[0] if marks else 0
        if crc != (_crc(record, mark, self.good_bytes) if marks else zlib.crc32(record)):
            return None
        self.good_bytes += layout.size + length
        self.mark = mark
        return record

    def _explain(self, size: int, rest: bytes) -> None:
        left = size - self.good_bytes
        length = int.from_bytes(rest[:4], "little")
        self.is_torn = not any(rest) or left < _HEADER.size or (self.good_bytes > 0 and length > left)
        self.is_old = self.is_old and self.good_bytes > 0  # else there is nothing of any version
        what = "torn" if self.is_torn else "damaged"
        self.problem = (
            f"{self.path}: record {self._num_read} at byte {self.good_bytes} is {what}:"
            f" it and what follows ({left} bytes) is not used"
        )


class LogPlace(NamedTuple):
    """A place between two lines of an event log, and what is before it."""

    num_bytes: int = 0
    num_lines: int = 0
    crc: int = 0
    """crc32 of all bytes before it."""

    def after(self, line: bytes) -> LogPlace:
        """Return the place behind one more line."""
        return LogPlace(self.num_bytes + len(line), self.num_lines + 1, zlib.crc32(line, self.crc))


START = LogPlace()


class EventLog:
    """Append-only; one writer."""

    def __init__(self, path: Path, disk: Disk, end: LogPlace = START) -> None:
        """What is beyond `end` is cut off."""
        self._disk = disk
        if path.exists():
            os.truncate(path, end.num_bytes)
        self.place = end
        """Behind the last event."""
        self._fd = disk.append(path)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return self.place.num_bytes

    def append(self, event: Event) -> None:
        """Write one event. Raises `OSError` when the disk refuses; the event then did not happen."""
        line = checked_line(encode_event(event), self.size)
        try:
            self._disk.write(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.place = self.place.after(line)

    def sync(self) -> None:
        """Return once all events are on stable storage. Raises `OSError`."""
        self._disk.sync(self._fd)

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)


_CHECK = re.compile(rb'\{"crc":"([0-9a-f]{8})",')


def checked_line(line: bytes, place: int) -> bytes:
    """Return a line of the event log with its checksum in front."""
    return b'{"crc":"%08x",%b' % (zlib.crc32(line[1:], place & 0xFFFFFFFF), line[1:])


class EventReader:
    """Iterates over the events of a log, up to its end or to the first line that is torn or damaged.

    What it tells is right once it has been read to its end.
    """

    def __init__(self, path: Path, start: LogPlace = START) -> None:
        self.path = path
        self.place = start
        """Behind the last event that was read."""
        self.num_unchecked = 0
        """Lines of an older version, without a checksum."""
        self.problem = ""
        """Why reading ended before the end of the file, in words; a torn last line is no problem."""

    @property
    def good_bytes(self) -> int:
        """Where the last whole line that was read ends."""
        return self.place.num_bytes

    def __iter__(self) -> Iterator[Event]:
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self.good_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                event = self._event(line)
                if event is None:
                    left = os.fstat(file.fileno()).st_size - self.good_bytes
                    self.problem = (
                        f"{self.path}: line {self.place.num_lines + 1} at byte {self.good_bytes} is damaged:"
                        f" it and what follows ({left} bytes) is not used"
                    )
                    return
                self.place = self.place.after(line)
                yield event

    def _event(self, line: bytes) -> Event | None:
        """Return the event on a line, None where it is damaged."""
        check = _CHECK.match(line)
        if check is not None:
            rest = line[check.end() :]
            if int(check[1], 16) != zlib.crc32(rest, self.good_bytes & 0xFFFFFFFF):
                return None
        elif self.num_unchecked < self.place.num_lines or not line.startswith(b'{"event":"'):
            return None  # no line without a checksum follows one that has one
        else:
            self.num_unchecked += 1
        try:
            return decode_event(line)
        except (ValueError, msgspec.ValidationError):
            return None


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log; a torn last line is none. Raises `RuntimeFault` at a damaged line."""
    reader = EventReader(path)
    yield from reader
    if reader.problem:
        raise RuntimeFault(reader.problem, "rlboost launch RUN --resume repairs it")
