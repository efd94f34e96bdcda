from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rlboost_runtime.run import paced_file
from rlboost_runtime.run.paced_file import (
    LEAST_BYTES,
    LOOK_EVERY_S,
    LOOK_S,
    LOOKS,
    MOST_BYTES,
    Pace,
    PacedFile,
)


class Disk:
    """A disk that takes so many bytes per second, on a clock of its own."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.now = bytes_per_s, 1000.0

    def write_for(self, pace: Pace, seconds: float) -> float:
        """Return the bytes per second that a writer reaches."""
        began, num_bytes = self.now, 0
        while self.now - began < seconds:
            took = pace.piece_bytes / self.bytes_per_s
            self.now += took
            num_bytes += pace.piece_bytes
            self.now += pace.wrote(pace.piece_bytes, took, self.now)
        return num_bytes / (self.now - began)


@pytest.mark.parametrize("bytes_per_s", [50e6, 1e9])
def test_a_disk_is_left_a_seventh_of_its_time_in_pieces_of_a_millisecond(bytes_per_s: float) -> None:
    disk, pace = Disk(bytes_per_s), Pace()
    disk.write_for(pace, 2 * LOOK_S)
    assert disk.write_for(pace, 20.0) == pytest.approx(0.85 * bytes_per_s, rel=0.01)
    assert 0.0005 <= pace.piece_bytes / bytes_per_s <= 0.002


def test_a_disk_that_is_slow_for_a_while_is_not_held_to_that() -> None:
    disk, pace = Disk(100e6), Pace()
    disk.write_for(pace, 2 * LOOK_S)
    disk.bytes_per_s = 10e6
    disk.write_for(pace, 100.0)
    disk.bytes_per_s = 100e6
    disk.write_for(pace, LOOK_EVERY_S / 2)
    assert disk.write_for(pace, 20.0) == pytest.approx(85e6, rel=0.01)


def test_a_disk_that_becomes_slower_is_left_time_again_within_seconds() -> None:
    disk, pace = Disk(100e6), Pace()
    disk.write_for(pace, 2 * LOOK_S)
    disk.bytes_per_s = 40e6
    disk.write_for(pace, (LOOKS + 2) * LOOK_S)
    assert disk.write_for(pace, 20.0) == pytest.approx(0.85 * 40e6, rel=0.01)


def test_one_slow_second_of_a_disk_changes_nothing() -> None:
    disk, pace = Disk(100e6), Pace()
    disk.write_for(pace, 2 * LOOK_S)
    disk.bytes_per_s = 40e6
    disk.write_for(pace, 1.5 * LOOK_S)
    disk.bytes_per_s = 100e6
    assert disk.write_for(pace, 20.0) == pytest.approx(85e6, rel=0.01)


def test_a_disk_is_looked_at_for_much_less_than_a_hundredth_of_the_time() -> None:
    disk, pace = Disk(50e6), Pace()
    disk.write_for(pace, 2 * LOOK_S)
    full = 0
    for _ in range(1200):
        full += disk.write_for(pace, 1.0) > 0.9 * 50e6
    assert 1 <= full <= 4


def test_pieces_stay_within_bounds() -> None:
    for bytes_per_s, size in ((1e4, LEAST_BYTES), (1e12, MOST_BYTES)):
        disk, pace = Disk(bytes_per_s), Pace()
        disk.write_for(pace, 100.0 if size == LEAST_BYTES else 2 * LOOK_S)
        assert pace.piece_bytes == size


def test_a_file_is_what_was_written_and_takes_no_more_room(tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    with PacedFile(tmp_path / "file", tmp_path) as file:
        for start in range(0, len(data), 700_000):
            assert file.write(data[start : start + 700_000]) == len(data[start : start + 700_000])
        assert file.tell() == len(data)
    assert (tmp_path / "file").read_bytes() == data
    assert (tmp_path / "file").stat().st_blocks * 512 < len(data) + 1_000_000


def test_an_empty_file_is_one_too(tmp_path: Path) -> None:
    PacedFile(tmp_path / "file").close()
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_system_without_reservations_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced_file._LIBC, "fallocate", lambda *arguments: -1)
    monkeypatch.setattr(paced_file._LIBC, "sync_file_range", lambda *arguments: -1)
    with PacedFile(tmp_path / "file") as file:
        file.write(bytes(500_000))
    assert (tmp_path / "file").stat().st_size == 500_000


def test_writers_of_one_turn_write_one_after_the_other(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from rlboost_runtime.run.paced_file import PacedFile
        with PacedFile(Path(sys.argv[1]) / "file", Path(sys.argv[1])) as file, file._in_turn():
            print("mine", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"mine\n"
        with PacedFile(tmp_path / "mine", tmp_path) as file:
            file.write(bytes(100))
            began = time.monotonic()
            threading.Timer(0.3, other.stdin.close).start()
            file.close()
            assert time.monotonic() - began >= 0.25
