"""What changed between two versions of one file, in a file of its own: lossless, whatever the bytes mean.

::

    payloads                  one per chunk of the new file, in order
    index                     one `_ROW` per chunk: how its payload is coded and how long its parts are
    trailer                   `MAGIC`, number of chunks, size of the new file

Chunks are those of the new file's manifest, so that a chunk is restored and checked against its digest in one
go, by any thread, in the memory of one chunk. A chunk's payload is nothing (as in the base), the tokens and
extras of `kernels` compressed by zstd, the codes and extras of `codes` likewise where more than
`CODES_SHARE` of it changed, or the chunk's own bytes where that is not larger.

Guarantees: applied to the right base a delta gives the very bytes; applied to anything else, or damaged, it
gives other bytes or `BadDelta`, which is why every restored chunk is checked before it is used
(`weights.pull.restore`).

A version offers a delta from the version before it, and those that this one already had (`add_deltas`). They
lie beside the version's own files, older ones as hard links, so that a version stays complete in itself and
one lease covers all of it. A delta is offered only where it pays: together with those after it, it takes less
than `MAX_SHARE` of the full file. Nothing is lost by leaving one out: every version can be fetched whole.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.delta import codes as delta_codes
from rlboost_runtime.weights.delta import kernels as delta_kernels
from rlboost_runtime.weights.delta.codes import FindCodes
from rlboost_runtime.weights.delta.kernels import Bytes, FindChanges, Patterns
from rlboost_runtime.weights.manifest import DELTA_PREFIX, Chunk, Delta, File, Manifest, describe_file

MAGIC = b"RLBdelta"
ZSTD_LEVEL = 1
"""3 is never smaller on these bytes and three times slower (benchmarks/weights)."""
MIN_MATCH = 7
"""Tokens hardly repeat: what gains is the entropy coder, and short matches only take its time."""
MAX_SHARE = 0.6
"""A delta above this share of the full file does not pay: restoring costs more than it saves."""

CODES_SHARE = 0.18
"""Of a chunk's patterns that changed: below it tokens are as fast, and smaller (benchmarks/weights)."""
_SAMPLE = 1021
"""One pattern of so many is looked at to guess that share: of 64, all of the memory would be read for it once
more. A prime number, so that it is not always the same columns of a tensor."""

_SAME, _TOKENS, _WHOLE, _CODES = 0, 1, 2, 3
_ROW = np.dtype([(name, "<u4") for name in ("kind", "main", "extras", "packed_main", "packed_extras")])
_TRAILER = struct.Struct("<8sQQ")
_AHEAD_PER_THREAD = 3  # chunks in work: bounds memory, keeps threads busy

T = TypeVar("T")
S = TypeVar("S")


class BadDelta(ValueError):
    """The file is no delta, or does not fit the base."""


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds what changed in a chunk, in each of the two forms."""

    tokens: FindChanges
    codes: FindCodes


@dataclass(frozen=True, slots=True)
class DeltaStats:
    """Size of a delta. `changed`: share of the 16-bit patterns that differ from the base."""

    num_bytes: int
    changed: float


def write_delta(
    base: Path,
    new: Path,
    chunks: Sequence[Chunk],
    target: Path,
    *,
    threads: int,
    max_share: float = MAX_SHARE,
    finder: Finder | None = None,
) -> DeltaStats | None:
    """Write to `target` a delta that turns `base` into `new`, which has these chunks.

    `finder`: finds the changes; None: on the CPU. Returns None, and leaves no file, if it would take
    more than `max_share` of `new`. The memory taken is that of a few chunks per thread. Raises `OSError`, and
    `ValueError` where the sizes differ.
    """
    size = new.stat().st_size
    if base.stat().st_size != size:
        raise ValueError(f"{base} and {new} differ in size")
    limit = max_share * size
    find = finder or Finder(delta_kernels.find_changes(), delta_codes.find_codes())
    rows = np.zeros(len(chunks), _ROW)
    written = num_changed = 0
    with mapped(base) as old, mapped(new) as fresh, target.open("wb") as out:

        def encode(chunk: Chunk) -> _Coded:
            end = chunk.offset + chunk.length
            return _encode(old[chunk.offset : end], fresh[chunk.offset : end], find)

        for i, coded in enumerate(in_order(encode, chunks, threads)):
            rows[i] = coded.row
            written += sum(out.write(part) for part in coded.parts)
            num_changed += coded.num_changed
            if written > limit:
                break
        else:
            out.write(rows.tobytes() + _TRAILER.pack(MAGIC, len(chunks), size))
    if written > limit:
        target.unlink()
        return None
    return DeltaStats(target.stat().st_size, num_changed / max(1, size // 2))


TARGET = "model.safetensors"
MAX_THREADS = 8
"""The trainer uses the head's cores too."""


def add_deltas(
    base_folder: Path,
    folder: Path,
    manifest: Manifest,
    max_deltas: int,
    chunk_bytes: int,
    finder: Finder | None = None,
) -> Manifest:
    """Write deltas into `folder`, which holds the files of `manifest`; return it with them.

    `base_folder`: the version before, held by the caller; `finder`: as `write_delta` has it. Without
    deltas where that one has another layout, the very same weights, or too much has changed. Raises
    `OSError`.
    """
    try:
        base = manifests.read_manifest(base_folder)
    except ProtocolError:
        return manifest
    target = _target(manifest)
    if target is None or base.tensors != manifest.tensors or target == _target(base):
        return manifest
    path = folder / f"{DELTA_PREFIX}{manifests.version_name(base.version)}.bin"
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    stats = write_delta(
        base_folder / TARGET, folder / TARGET, target.chunks, path, threads=threads, finder=finder
    )
    if stats is None:
        return manifest
    file = describe_file(path, chunk_bytes)
    deltas = [Delta(base.version, base.content_digest, TARGET, file, round(stats.changed, 6))]
    size = stats.num_bytes
    for delta in base.deltas[: max_deltas - 1]:
        size += delta.file.size
        if size > MAX_SHARE * target.size or _grid(base) != _grid(manifest):
            break
        _link(base_folder / delta.file.name, folder / delta.file.name)
        deltas.append(delta)
    return msgspec.structs.replace(manifest, deltas=tuple(deltas))


def _target(manifest: Manifest) -> File | None:
    return next((file for file in manifest.files if file.name == TARGET), None)


def _grid(manifest: Manifest) -> list[tuple[int, int]]:
    """Return how the target is cut: deltas can follow one another only on the same chunks."""
    target = _target(manifest)
    return [] if target is None else [(chunk.offset, chunk.length) for chunk in target.chunks]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


class DeltaFile:
    """An opened delta file. `apply` may be called by several threads. Raises `BadDelta` where it is none."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise BadDelta(f"{path.name} cannot be read: {exc}") from exc
        try:
            self._rows, self._starts, self.size = _read_index(self._map)
        except BadDelta:
            self._map.close()
            raise

    @property
    def num_chunks(self) -> int:
        """How many chunks the new file has."""
        return len(self._rows)

    def is_empty(self, index: int) -> bool:
        """Return True if chunk `index` is as in the base."""
        return bool(self._rows[index]["kind"] == _SAME)

    def apply(self, index: int, data: memoryview) -> None:
        """Turn the base's bytes of chunk `index` into the new file's, in place. Raises `BadDelta`."""
        row = self._rows[index]
        start = int(self._starts[index])
        packed_main, packed_extras = int(row["packed_main"]), int(row["packed_extras"])
        if row["kind"] == _SAME:
            return
        if row["kind"] == _WHOLE:
            if packed_main != len(data):
                raise BadDelta(f"chunk {index} has {packed_main} bytes, expected {len(data)}")
            data[:] = self._map[start : start + packed_main]
            return
        num = len(data) // 2
        is_codes = row["kind"] == _CODES
        most = delta_codes.num_codes(num) if is_codes else delta_kernels.max_tokens(num)
        if is_codes and row["main"] != most:
            raise BadDelta(f"chunk {index} has {row['main']} bytes of codes, expected {most}")
        middle = start + packed_main
        main = _unpack(self._map[start:middle], int(row["main"]), most)
        packed = self._map[middle : middle + packed_extras]
        extras = _unpack(packed, int(row["extras"]), _max_extras(num), padded=True)
        apply = delta_codes.apply_codes() if is_codes else delta_kernels.apply_changes()
        if not apply(np.frombuffer(data[: 2 * num], np.int16), main, extras):
            raise BadDelta(f"chunk {index} does not make sense")

    def close(self) -> None:
        """Close; idempotent."""
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_order(work: Callable[[S], T], items: Sequence[S], threads: int) -> Iterator[T]:
    """Yield the results of `work` in the order of `items`, a bounded number of them being worked on."""
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        rest = iter(items)
        running = [pool.submit(work, item) for item in islice(rest, _AHEAD_PER_THREAD * threads)]
        try:
            while running:
                result = running.pop(0).result()
                running += [pool.submit(work, item) for item in islice(rest, 1)]
                yield result
        finally:
            for future in running:
                future.cancel()


# --- one chunk -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Coded:
    row: tuple[int, int, int, int, int]
    parts: tuple[bytes, ...]
    num_changed: int


class _Scratch(threading.local):
    """Memory of one thread, kept from chunk to chunk: fresh pages cost more than the coding."""

    def __init__(self) -> None:
        self.main = self.extras = np.empty(0, np.uint8)
        parameters = zstandard.ZstdCompressionParameters.from_level(
            ZSTD_LEVEL, min_match=MIN_MATCH, strategy=zstandard.STRATEGY_FAST
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()

    def reserve(self, num_patterns: int) -> None:
        """Make room for chunks of so many patterns."""
        if self.main.size < delta_kernels.max_tokens(num_patterns):  # more than there are codes
            self.main = np.empty(delta_kernels.max_tokens(num_patterns), np.uint8)
            self.extras = np.empty(_max_extras(num_patterns), np.uint8)


_scratch = _Scratch()


def _max_extras(num_patterns: int) -> int:
    return max(delta_kernels.max_extras(num_patterns), delta_codes.max_extras(num_patterns))


def _encode(old: memoryview, new: memoryview, find: Finder) -> _Coded:
    num = len(new) // 2
    _scratch.reserve(num)
    main, extras = _scratch.main, _scratch.extras
    before, after = np.frombuffer(old[: 2 * num], np.int16), np.frombuffer(new[: 2 * num], np.int16)
    if _changed_share(before, after) > CODES_SHARE:
        kind, num_main = _CODES, delta_codes.num_codes(num)
        num_extras, num_changed = find.codes(before, after, main[:num_main], extras)
    else:
        kind = _TOKENS
        num_main, num_extras, num_changed = find.tokens(before, after, main, extras)
    if old[2 * num :] != new[2 * num :]:  # an odd last byte: as rare as it is small
        return _whole(new, num_changed)
    if num_changed == 0:
        return _Coded((_SAME, 0, 0, 0, 0), (), 0)
    if num_main + num_extras > 2 * len(new):  # no entropy coder saves that
        return _whole(new, num_changed)
    packed_main = _scratch.compressor.compress(main[:num_main].data)
    packed_extras = _scratch.compressor.compress(extras[:num_extras].data)
    if len(packed_main) + len(packed_extras) >= len(new):
        return _whole(new, num_changed)
    row = (kind, num_main, num_extras, len(packed_main), len(packed_extras))
    return _Coded(row, (packed_main, packed_extras), num_changed)


def _changed_share(before: Patterns, after: Patterns) -> float:
    """Guess what share of the patterns changed."""
    where = slice(None, before.size // _SAMPLE * _SAMPLE)
    sample = before[where].reshape(-1, _SAMPLE)[:, 0] != after[where].reshape(-1, _SAMPLE)[:, 0]
    return float(sample.mean()) if sample.size else 0.0


def _whole(new: memoryview, num_changed: int) -> _Coded:
    return _Coded((_WHOLE, 0, 0, len(new), 0), (bytes(new),), num_changed)


def _unpack(packed: bytes, size: int, limit: int, *, padded: bool = False) -> Bytes:
    if size > limit:
        raise BadDelta(f"{size} bytes in a chunk, at most {limit} can be")
    try:
        data = _scratch.decompressor.decompress(packed, max_output_size=max(1, size)) if size else b""
    except zstandard.ZstdError as exc:
        raise BadDelta(f"a chunk cannot be decompressed: {exc}") from exc
    if len(data) != size:
        raise BadDelta(f"a chunk has {len(data)} bytes, expected {size}")
    return np.frombuffer(data + bytes(delta_kernels.EXTRAS_PADDING) if padded else data, np.uint8)


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Yield the file's bytes as they lie in the page cache, without copying them."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            yield memoryview(b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages, memoryview(pages) as view:
            yield view


def _read_index(data: mmap.mmap) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64], int]:
    end = len(data) - _TRAILER.size
    if end < 0:
        raise BadDelta("too short for a delta")
    magic, num_chunks, size = _TRAILER.unpack(data[end:])
    start = end - num_chunks * _ROW.itemsize
    if magic != MAGIC or start < 0:
        raise BadDelta("this is no delta")
    rows = np.frombuffer(data[start:end], _ROW)
    ends = np.cumsum(rows["packed_main"].astype(np.int64) + rows["packed_extras"])
    if (int(ends[-1]) if num_chunks else 0) != start:
        raise BadDelta("its index does not fit its payloads")
    return rows, np.concatenate([[0], ends[:-1]]) if num_chunks else ends, size
