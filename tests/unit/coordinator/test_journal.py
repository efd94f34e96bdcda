"""The journal's promises, with disks that fail, tear and delay."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlboost_runtime.coordinator.storage import journal as journal_module
from rlboost_runtime.coordinator.storage.journal import Journal, segment_path
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.seams import SystemDisk


class FaultyDisk(SystemDisk):
    """The real disk, until told otherwise."""

    def __init__(self) -> None:
        self.free_bytes: int | None = None  # None: as many as one likes
        self.sync_error: OSError | None = None
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.synced: list[int] = []  # file length at each sync
        self.opened: list[Path] = []

    def append(self, path: Path) -> int:
        self.opened.append(path)
        return super().append(path)

    def write(self, fd: int, data: bytes) -> None:
        if self.free_bytes is not None and len(data) > self.free_bytes:
            super().write(fd, data[: self.free_bytes])  # a part gets through, as on a real disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.may_sync.wait(10)
        if self.sync_error is not None:
            raise self.sync_error
        super().sync(fd)
        self.synced.append(os.fstat(fd).st_size)


class Bench:
    """A started journal, what it committed and what it complained about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = FaultyDisk()
        self.problems: list[str | None] = []
        self.committed: list[int] = []
        self.journal = Journal(folder, self.disk, self.problems.append)

    def append(self, record: bytes) -> None:
        number = len(record)
        self.journal.append(record, lambda: self.committed.append(number))

    def read(self, step: int) -> list[bytes]:
        return list(Journal.read(self.folder, step))


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    bench.journal.start(asyncio.get_running_loop())
    try:
        yield bench
    finally:
        bench.disk.free_bytes = None
        bench.disk.sync_error = None
        bench.disk.may_sync.set()
        await bench.journal.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is awaited happens in a thread or on disk
            await asyncio.sleep(0.002)


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    monkeypatch.setattr(journal_module, "GATHER_S", 0.001)


async def test_records_come_back_in_order_and_callbacks_run_in_order(tmp_path: Path):
    async with started(tmp_path / "journal") as bench:
        bench.journal.open_step(12)
        for size in range(1, 50):
            bench.append(b"x" * size)
        assert bench.journal.pending_bytes == sum(range(1, 50))
        await bench.journal.flushed()
        assert bench.committed == list(range(1, 50))
        assert bench.journal.pending_bytes == 0
    assert bench.read(12) == [b"x" * size for size in range(1, 50)]
    assert segment_path(bench.folder, 12).name == "step-000012.seg"
    assert segment_path(bench.folder, 12).stat().st_mode & 0o777 == 0o600
    assert bench.problems == []


async def test_callbacks_wait_for_stable_storage_and_run_on_the_loop(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        await bench.journal.flushed()
        bench.disk.may_sync.clear()
        threads: list[threading.Thread] = []
        bench.journal.append(b"abc", lambda: threads.append(threading.current_thread()))
        await until(lambda: segment_path(tmp_path, 1).stat().st_size > 8)
        await asyncio.sleep(0.02)
        assert threads == []
        assert bench.journal.pending_bytes == 3
        bench.disk.may_sync.set()
        await bench.journal.flushed()
        assert threads == [threading.current_thread()]


async def test_what_queues_during_a_sync_is_committed_with_one_more(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"a")
        await bench.journal.flushed()
        bench.disk.may_sync.clear()
        bench.append(b"bb")
        await until(lambda: segment_path(tmp_path, 1).stat().st_size > 25)
        for size in range(3, 100):
            bench.append(b"c" * size)
        bench.disk.synced.clear()
        bench.disk.may_sync.set()
        await bench.journal.flushed()
        assert len(bench.disk.synced) == 2


async def test_the_first_record_waits_for_nothing_and_the_next_ones_gather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal_module, "GATHER_S", 0.5)
    monkeypatch.setattr(journal_module, "SHARE", 1e-9)
    async with started(tmp_path / "journal") as bench:
        bench.journal.open_step(0)
        await asyncio.sleep(0.6)  # the step's own record is past
        began = time.monotonic()
        bench.append(b"a")
        await until(lambda: bench.committed == [1])
        assert time.monotonic() - began < 0.25
        bench.append(b"bb")
        bench.append(b"ccc")
        await until(lambda: bench.committed == [1, 2, 3])
        assert time.monotonic() - began >= 0.5
        assert len(bench.disk.synced) <= 3, "one commit for both"


async def test_an_empty_record_writes_nothing_and_keeps_its_turn(tmp_path: Path):
    async with started(tmp_path) as bench:
        order: list[str] = []
        bench.journal.open_step(1)
        bench.journal.append(b"a", lambda: order.append("a"))
        bench.journal.append(b"", lambda: order.append("empty"))
        bench.journal.append(b"b", lambda: order.append("b"))
        await bench.journal.flushed()
        assert order == ["a", "empty", "b"]
    assert bench.read(1) == [b"a", b"b"]


async def test_a_callback_that_raises_does_not_stop_the_others(tmp_path: Path):
    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"a")
        bench.journal.append(b"b", lambda: 1 / 0)
        bench.append(b"ccc")
        await bench.journal.flushed()
        assert bench.committed == [1, 3]
    assert [type(error) for error in raised] == [ZeroDivisionError]


async def test_a_full_disk_loses_and_acknowledges_nothing(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"a" * 10)
        await bench.journal.flushed()
        bench.disk.free_bytes = 25  # some whole records and a part of one fit
        for size in (3, 4, 50):
            bench.append(b"b" * size)
        await until(lambda: bench.problems)
        await asyncio.sleep(0.1)  # several attempts
        bench.append(b"c" * 6)
        assert bench.committed == [10]
        assert bench.problems == [f"journal: No space left on device ({tmp_path})"]
        assert bench.journal.pending_bytes == 63
        bench.disk.free_bytes = None
        await bench.journal.flushed()
        assert bench.committed == [10, 3, 4, 50, 6]
        assert bench.problems[1:] == [None]
    assert bench.read(1) == [b"a" * 10, b"b" * 3, b"b" * 4, b"b" * 50, b"c" * 6]


async def test_a_failed_sync_is_not_taken_for_a_commit(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"a")
        await bench.journal.flushed()
        bench.disk.sync_error = OSError(errno.EIO, "Input/output error")
        bench.append(b"bb")
        await until(lambda: bench.problems)
        assert bench.committed == [1]
        bench.disk.sync_error = None
        await bench.journal.flushed()
        assert bench.committed == [1, 2]
    assert bench.read(1) == [b"a", b"bb"]


async def test_a_failure_while_a_segment_is_opened_repeats_no_record(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.disk.free_bytes = 12
        bench.journal.open_step(1)
        bench.append(b"head")
        bench.append(b"tail" * 10)
        await until(lambda: bench.problems)
        bench.disk.free_bytes = None
        await bench.journal.flushed()
    assert bench.read(1) == [b"head", b"tail" * 10]


async def test_dropping_steps_frees_a_full_disk_and_releases_what_is_queued_for_them(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"a")
        await bench.journal.flushed()
        bench.disk.free_bytes = 0
        bench.append(b"bb")
        await until(lambda: bench.problems)
        bench.journal.open_step(2)
        bench.append(b"ccc")
        bench.journal.drop_before(2)
        assert bench.journal.pending_bytes == 3
        await until(lambda: bench.committed == [1, 2])
        assert not segment_path(tmp_path, 1).exists()
        bench.disk.free_bytes = None
        await bench.journal.flushed()
        assert bench.read(2) == [b"ccc"]
        assert bench.journal.pending_bytes == 0


async def test_only_earlier_segments_are_dropped(tmp_path: Path):
    async with started(tmp_path) as bench:
        for step in (1, 2, 3):
            bench.journal.open_step(step)
            bench.append(bytes([step]))
        bench.journal.drop_before(3)
        bench.journal.append(b"more")
        await bench.journal.flushed()
        await until(lambda: not segment_path(tmp_path, 2).exists())
        assert [bench.read(step) for step in (1, 2, 3)] == [[], [], [b"\3", b"more"]]
        bench.journal.open_step(1)  # an earlier step again: a fresh segment
        bench.append(b"anew")
        await bench.journal.flushed()
        assert bench.read(1) == [b"anew"]


@pytest.mark.parametrize("tail", [b"\0" * 64, b"\x05\0\0\0", b"\xff\xff\xff\x7f????abc", "half"])
async def test_a_torn_tail_is_not_read_and_is_cut_off_before_appending(tmp_path: Path, tail):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"one")
        bench.append(b"three")
    path = segment_path(tmp_path, 1)
    if tail == "half":
        os.truncate(path, path.stat().st_size - 2)
        kept = [b"one"]
    else:
        path.write_bytes(path.read_bytes() + tail)
        kept = [b"one", b"three"]
    assert bench.read(1) == kept
    async with started(tmp_path) as again:
        again.journal.open_step(1)
        again.append(b"next")
    assert again.read(1) == [*kept, b"next"]


async def test_a_damaged_record_ends_the_reading(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        for record in (b"first", b"second", b"third"):
            bench.append(record)
    path = segment_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    assert data.count(b"second") == 1
    data[data.index(b"second")] ^= 1
    path.write_bytes(data)
    reader = Journal.read(tmp_path, 1)
    assert list(reader) == [b"first"]
    assert reader.problem.startswith(f"{path}: record 1 at byte 29 is damaged")
    assert not reader.is_torn


async def test_a_record_at_another_place_is_damaged(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        for record in (b"aaaa", b"bbbb", b"cccc"):
            bench.append(record)
    path = segment_path(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:8] + data[28:48] + data[8:28] + data[48:])  # the first two change places
    assert bench.read(1) == []
    path.write_bytes(data[:28] + data[48:])  # the second is cut out
    assert bench.read(1) == [b"aaaa"]


async def test_a_segment_of_an_older_version_is_read_and_goes_on_as_it_is(tmp_path: Path):
    old = b"".join(struct.pack("<II", len(r), zlib.crc32(r)) + r for r in (b"one", b"three"))
    segment_path(tmp_path, 1).write_bytes(old)
    reader = Journal.read(tmp_path, 1)
    assert (list(reader), reader.is_old, reader.problem) == ([b"one", b"three"], True, "")
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"next")
    assert bench.read(1) == [b"one", b"three", b"next"]


async def test_a_fresh_step_starts_empty_and_an_opened_one_goes_on(tmp_path: Path):
    async with started(tmp_path) as bench:
        bench.journal.open_step(1)
        bench.append(b"a")
        bench.journal.open_step(1)
        bench.append(b"b")
        await bench.journal.flushed()
        assert bench.read(1) == [b"a", b"b"]
        bench.journal.open_step(1, fresh=True)
        bench.append(b"c")
        await bench.journal.flushed()
        assert bench.read(1) == [b"c"]
        segment_path(tmp_path, 1).unlink()  # behind its back
        bench.journal.open_step(1)
        bench.append(b"d")
        await bench.journal.flushed()
        assert bench.read(1) == [b"d"]


async def test_close_writes_what_is_queued_and_runs_its_callbacks(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.journal.open_step(1)
    bench.append(b"before the start")
    bench.journal.start(asyncio.get_running_loop())
    bench.append(b"x")
    await bench.journal.close()
    await bench.journal.close()
    assert bench.committed == [16, 1]
    assert bench.read(1) == [b"before the start", b"x"]
    assert not [thread for thread in threading.enumerate() if thread.name == "journal"]
    with pytest.raises(RuntimeError, match="closed"):
        await bench.journal.flushed()


async def test_close_on_a_full_disk_says_what_was_not_written(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.disk.free_bytes = 0
    bench.journal.start(asyncio.get_running_loop())
    bench.journal.open_step(1)
    bench.append(b"abc")
    with pytest.raises(RuntimeFault, match=r"No space left on device.*3 bytes were not written"):
        await bench.journal.close()
    assert bench.committed == []
    assert not [thread for thread in threading.enumerate() if thread.name == "journal"]


def test_a_step_without_a_segment_has_no_records(tmp_path: Path):
    assert list(Journal.read(tmp_path / "nowhere", 3)) == []


async def test_two_segments_stay_open_and_each_record_goes_to_its_own(tmp_path: Path) -> None:
    async with started(tmp_path) as bench:
        bench.journal.open_step(0, fresh=True)
        bench.journal.append(b"a")
        bench.journal.open_step(1, fresh=True)
        for record in (b"b", b"c"):
            bench.journal.append(record)
            bench.journal.append(record.upper(), step=0)
            await bench.journal.flushed()
        assert len(bench.disk.opened) == 2, "neither is opened again, which reads it to its end"
        assert bench.read(0) == [b"a", b"B", b"C"]
        bench.journal.drop_before(1)
        await bench.journal.flushed()
        bench.journal.append(b"d")
    assert bench.read(0) == []
    assert bench.read(1) == [b"b", b"c", b"d"]
