"""Episodes that are over, on disk until their step is in a checkpoint: a trainer that is killed plays only
those again that were not over.

One file per step: `episodes/step-000012.msgpack`, a header and then a record per episode, each with its
length and a CRC. A record that is cut off or damaged, and what follows it, does not count.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from rlboost_runtime.trainer.episodes.outcome import EpisodeResult

_FRAME = struct.Struct("<II")


class StepKey(msgspec.Struct, frozen=True, array_like=True):
    """What a step's episodes belong to: other prompts or other weights need other episodes."""

    step: int
    policy_version: int
    prompts_digest: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    number: int
    result: EpisodeResult


class EpisodeFiles:
    """The files of a run. For one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def begin(self, key: StepKey) -> dict[int, EpisodeResult]:
        """Return what is there of a step's episodes, by number, and add to it from now on."""
        self.close()
        self._folder.mkdir(exist_ok=True)
        path = self._path(key.step)
        found, end = _read(path, key)
        self._file = path.open("r+b" if end else "wb")
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._append(msgspec.msgpack.encode(key))
        return found

    def add(self, number: int, result: EpisodeResult) -> None:
        """Keep an episode; it is on stable storage when this returns."""
        self._append(msgspec.msgpack.encode(_Entry(number, result)))

    def drop_through(self, step: int) -> None:
        """Forget the episodes of a step that is in a checkpoint, and of all before it."""
        for path in self._folder.glob("step-*.msgpack"):
            if int(path.stem.split("-")[1]) <= step:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file of the present step."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(_FRAME.pack(len(data), zlib.crc32(data)) + data)
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.msgpack"


def kept_steps(folder: Path) -> Iterator[tuple[StepKey, dict[int, EpisodeResult]]]:
    """Yield the steps that a run has kept, in order: what their episodes belong to, and these by number."""
    for path in sorted(folder.glob("step-*.msgpack")):
        first = next(_records(path), None)
        if first is not None:
            key = msgspec.msgpack.decode(first[0], type=StepKey)
            yield key, _read(path, key)[0]


def _read(path: Path, key: StepKey) -> tuple[dict[int, EpisodeResult], int]:
    """Return the episodes of a file and how many of its bytes are good; none if it is of something else."""
    found: dict[int, EpisodeResult] = {}
    end = 0
    for data, after in _records(path):
        try:
            if end == 0:
                if msgspec.msgpack.decode(data, type=StepKey) != key:
                    return {}, 0
            else:
                entry = msgspec.msgpack.decode(data, type=_Entry)
                found[entry.number] = entry.result
        except msgspec.MsgspecError:
            break
        end = after
    return found, end


def _records(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the records that are whole, each with where it ends."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    at = 0
    while at + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, at)
        data = content[at + _FRAME.size : at + _FRAME.size + length]
        if len(data) < length or zlib.crc32(data) != crc:
            return
        at += _FRAME.size + length
        yield data, at
