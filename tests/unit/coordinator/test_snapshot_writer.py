"""When a snapshot is written, and that none is used that does not belong to its event log."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.coordinator.storage import snapshot as snapshots
from rlboost_runtime.coordinator.storage.journal import LogPlace
from rlboost_runtime.coordinator.storage.snapshot import SnapshotWriter, UnfitSnapshot, read_snapshot

PLACE = LogPlace(5, 1, 77)


class Written(SnapshotWriter):
    """Counts what it would write; the last one took `_took_s`."""

    written = 0
    busy = False

    @property
    def is_busy(self) -> bool:
        return self.busy

    def write(self, state: Any, place: LogPlace) -> None:
        self.written += 1
        self._num_since = 0


class PlayedClock:
    at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_EVENTS", 3)
    monkeypatch.setattr(snapshots, "LATEST_EVENTS", 6)


def events(writer: Written, count: int, *, is_quiet: bool = False) -> int:
    for _ in range(count):
        writer.after_event(None, PLACE, is_quiet=is_quiet)
    return writer.written


@pytest.mark.usefixtures("short")
def test_quick_ones_are_written_often_and_slow_ones_after_a_step_or_late() -> None:
    writer = Written(Path("none"), "code", PlayedClock(), 0)
    assert events(writer, 5) == 0, "how long one takes is not known"
    assert events(writer, 1) == 1
    writer._took_s = snapshots.QUICK_S
    assert (events(writer, 2), events(writer, 1)) == (1, 2)
    writer._took_s = 1.1 * snapshots.QUICK_S
    assert (events(writer, 5), events(writer, 1)) == (2, 3)
    assert events(writer, 2, is_quiet=True) == 3
    assert events(writer, 1, is_quiet=True) == 4


@pytest.mark.usefixtures("short")
def test_events_before_this_process_count() -> None:
    writer = Written(Path("none"), "code", PlayedClock(), 5)
    assert events(writer, 1) == 1


@pytest.mark.usefixtures("short")
def test_none_is_written_while_one_is_or_too_soon_after_it() -> None:
    clock = PlayedClock()
    writer = Written(Path("none"), "code", clock, 0)
    writer.busy = True
    assert events(writer, 20) == 0
    writer.busy = False
    writer._not_before = clock.at + 10.0
    assert events(writer, 20) == 0
    clock.at += 10.0
    assert events(writer, 1) == 1


def written(folder: Path) -> tuple[Path, Path]:
    """Write an event log of two lines and a snapshot of what is before the second."""
    log, path = folder / "events.log", folder / "snapshot"
    log.write_bytes(b"first\nsecond\n")
    writer = SnapshotWriter(path, "code", PlayedClock(), 0)
    writer.write({"a": 1}, LogPlace(6, 1, zlib.crc32(b"first\n")))
    writer.join()
    return path, log


def test_a_snapshot_is_read_with_its_place(tmp_path: Path) -> None:
    path, log = written(tmp_path)
    assert read_snapshot(path, "code", log) == ({"a": 1}, LogPlace(6, 1, zlib.crc32(b"first\n")))


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_log_of_many_blocks_is_checked_whole(tmp_path: Path, size: int) -> None:
    path, log = tmp_path / "snapshot", tmp_path / "events.log"
    data = bytearray(b"0123456789abcdef" * (size // 16 + 1))
    log.write_bytes(data)
    place = LogPlace(size, 9, zlib.crc32(data[:size]))
    writer = SnapshotWriter(path, "code", PlayedClock(), 0)
    writer.write("state", place)
    writer.join()
    assert read_snapshot(path, "code", log) == ("state", place)
    for at in (0, size // 2, size - 1):
        data[at] ^= 1
        log.write_bytes(data)
        with pytest.raises(UnfitSnapshot, match="not the one"):
            read_snapshot(path, "code", log)
        data[at] ^= 1
    data[size] ^= 1
    log.write_bytes(data)
    assert read_snapshot(path, "code", log)[0] == "state", "what comes after it does not matter"


def test_a_place_is_that_behind_all_lines_before_it() -> None:
    lines = [b"first\n", b"second\n", b"third\n"]
    place = LogPlace()
    for line in lines:
        place = place.after(line)
    whole = b"".join(lines)
    assert place == LogPlace(len(whole), len(lines), zlib.crc32(whole))


def test_a_snapshot_of_the_whole_log_is_fit(tmp_path: Path) -> None:
    path, log = written(tmp_path)
    log.write_bytes(b"first\n")
    assert read_snapshot(path, "code", log)[0] == {"a": 1}


def test_what_does_not_belong_to_it_makes_a_snapshot_unfit(tmp_path: Path) -> None:
    path, log = written(tmp_path)
    with pytest.raises(UnfitSnapshot, match="another version"):
        read_snapshot(path, "other code", log)
    whole = log.read_bytes()
    for spoilt, why in ((b"first", "shorter"), (b"fIrst\nsecond\n", "not the one")):
        log.write_bytes(spoilt)
        with pytest.raises(UnfitSnapshot, match=why):
            read_snapshot(path, "code", log)
    log.unlink()
    with pytest.raises(UnfitSnapshot, match="shorter"):
        read_snapshot(path, "code", log)
    log.write_bytes(whole)
    data = bytearray(path.read_bytes())
    for at in (0, 15, 16, len(data) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(UnfitSnapshot, match="damaged"):
            read_snapshot(path, "code", log)
        data[at] ^= 1
    path.write_bytes(data[:10])
    with pytest.raises(UnfitSnapshot, match="damaged"):
        read_snapshot(path, "code", log)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_snapshot(path, "code", log)
