"""What a weight version consists of, in one JSON file beside the weights.

A version lies in a folder named by `version_name`: `model.safetensors`, `config.json`,
`generation_config.json` and `manifest.json`. The manifest lists each other file with its chunks and their
BLAKE3 digests, where every tensor lies, and a *probe*: a prompt with its greedy continuation and logprobs, by
which an engine proves that it serves these very weights.

Guarantees of a `Manifest` that was read here: the chunks tile every file exactly; file names stay inside the
folder; every tensor lies inside its file; `content_digest` agrees with the chunk digests. Anything else is a
`ProtocolError`. Unknown keys are ignored.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from rlboost_runtime.errors import ProtocolError

SCHEMA = (1, 1)
"""(major, minor). The same major can be read; a higher minor only adds fields."""

MANIFEST = "manifest.json"

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
DELTA_PREFIX = "delta-"
"""What the names of delta files begin with."""
MAX_CHUNK_BYTES = 256 * 1024 * 1024
"""A receiver holds one chunk per stream in memory."""

_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_VERSION_NAME = re.compile(r"v([0-9]{6,})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDY = "publish the version again with this RLBoost version"


class Chunk(msgspec.Struct, frozen=True):
    """A byte range of a file and the BLAKE3 of its bytes in hex."""

    offset: int
    length: int
    blake3: str


class File(msgspec.Struct, frozen=True):
    """One file, `size` in bytes; its chunks in order."""

    name: str
    size: int
    chunks: tuple[Chunk, ...]


class Tensor(msgspec.Struct, frozen=True):
    """Where a tensor's bytes lie: absolute offset and length in `file`; dtype as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


class Tied(msgspec.Struct, frozen=True):
    """A parameter that shares the stored tensor `same_as` and is not stored itself."""

    name: str
    same_as: str


class Delta(msgspec.Struct, frozen=True):
    """A file that turns `target` of an earlier version into a later one's: the first of a version's deltas
    leads to that version, each next one to the base of the one before it.

    `base_digest`: the base's content digest; a base with another one is of no use. `changed`: share of the
    16-bit patterns that differ. See `weights.delta.file`.
    """

    base: int
    base_digest: str
    target: str
    file: File
    changed: float


class Probe(msgspec.Struct, frozen=True):
    """`next_token_ids` greedily continue `token_ids`; `logprobs` are theirs, natural logs at temperature 1.

    `tolerance`: how far another engine's logprobs may be off, in nats.
    """

    token_ids: tuple[int, ...]
    next_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float


class Manifest(msgspec.Struct, frozen=True):
    """A weight version. `created_at`: seconds since the epoch. `base`: always None for encoding "full"."""

    schema: tuple[int, int]
    version: int
    encoding: str
    base: int | None
    files: tuple[File, ...]
    tensors: tuple[Tensor, ...]
    tied: tuple[Tied, ...]
    probe: Probe
    content_digest: str
    """BLAKE3 over all files' names, sizes and chunk digests: equal for equal content in any version."""
    created_at: float
    deltas: tuple[Delta, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all files, the manifest itself left out."""
        return sum(file.size for file in self.files)

    @property
    def all_files(self) -> tuple[File, ...]:
        """The version's files, then those of its deltas."""
        return (*self.files, *(delta.file for delta in self.deltas))


def version_name(version: int) -> str:
    """Return the name of a version's folder: `v000012`."""
    return f"v{version:06d}"


def parse_version_name(name: str) -> int | None:
    """Return the version whose folder is called `name`, None where it is no such name."""
    match = _VERSION_NAME.fullmatch(name)
    if match is None or version_name(int(match[1])) != name:
        return None
    return int(match[1])


def digest(data: bytes | memoryview) -> str:
    """Return the digest by which chunks are named: BLAKE3 in hex."""
    return blake3(data).hexdigest()


def content_digest(files: Sequence[File]) -> str:
    """Return the digest of a version's content: order of the files does not matter."""
    rows = sorted([f.name, f.size, [[c.length, c.blake3] for c in f.chunks]] for f in files)
    return digest(json.dumps(rows, separators=(",", ":")).encode())


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON. Raises `ProtocolError` where it would be refused when read."""
    _check(manifest)
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def decode_manifest(data: bytes) -> Manifest:
    """Read and check a manifest. Raises `ProtocolError`."""
    try:
        head: Any = msgspec.json.decode(data)  # any JSON: the schema decides whether we can read the rest
        major = head["schema"][0]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, IndexError) as exc:
        raise ProtocolError("the weight manifest is no manifest", _REMEDY) from exc
    if major != SCHEMA[0]:
        raise ProtocolError(
            f"the weight manifest has schema {major}, this version reads {SCHEMA[0]}",
            "run the same RLBoost version on the head and on the machines",
        )
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:  # ValidationError is a DecodeError
        raise ProtocolError(f"the weight manifest cannot be read: {exc}", _REMEDY) from exc
    _check(manifest)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the version in `folder`. Raises `ProtocolError` on none or garbage."""
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as exc:
        raise ProtocolError(f"no weight manifest in {folder}: {exc.strerror}", _REMEDY) from exc
    return decode_manifest(data)


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """Return the tensors of a safetensors file, by offset. Raises `ProtocolError` where it is none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header: Any = json.loads(file.read(length))  # checked field by field below
        start = 8 + length
        tensors = [
            Tensor(
                name=str(name),
                dtype=str(entry["dtype"]),
                shape=tuple(int(n) for n in entry["shape"]),
                file=path.name,
                offset=start + int(entry["data_offsets"][0]),
                length=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
        raise ProtocolError(f"{path.name} is no safetensors file: {exc}", _REMEDY) from exc
    return tuple(sorted(tensors, key=lambda tensor: (tensor.offset, tensor.name)))


def probe_matches(manifest: Manifest, token_ids: Sequence[int], logprobs: Sequence[float]) -> str | None:
    """Compare an engine's greedy continuation of the probe with the trainer's; None: they agree.

    Logprobs are compared position by position as long as the ids agree. The first differing id is accepted
    only as a near tie (both picks equally likely within the tolerance); what follows it has another context
    and is not compared. Otherwise returns a description of the problem.
    """
    probe = manifest.probe
    if len(token_ids) != len(logprobs):
        return f"probe: {len(token_ids)} tokens but {len(logprobs)} logprobs"
    for i, value in enumerate(logprobs):
        if not math.isfinite(value):
            return f"probe: logprob {value} at position {i}"
    for i, (expected, wanted) in enumerate(zip(probe.next_token_ids, probe.logprobs, strict=True)):
        if i >= len(token_ids):
            return f"probe: {len(token_ids)} tokens instead of {len(probe.next_token_ids)}"
        off = abs(logprobs[i] - wanted)
        same = token_ids[i] == expected
        if not off <= probe.tolerance:
            what = f"token {token_ids[i]}" if same else f"token {token_ids[i]} instead of {expected}"
            return (
                f"probe: {what} at position {i} has logprob {logprobs[i]:.4f},"
                f" expected {wanted:.4f} within {probe.tolerance:g}"
            )
        if not same:
            return None
    if len(token_ids) > len(probe.next_token_ids):
        return f"probe: {len(token_ids)} tokens instead of {len(probe.next_token_ids)}"
    return None


def _check(manifest: Manifest) -> None:
    problem = _problem(manifest)
    if problem is not None:
        raise ProtocolError(f"the weight manifest makes no sense: {problem}", _REMEDY)


def _problem(manifest: Manifest) -> str | None:
    if manifest.version < 0:
        return f"version {manifest.version}"
    if manifest.encoding != "full" or manifest.base is not None:
        return f"encoding {manifest.encoding!r} on base {manifest.base}, only full versions are understood"
    for file in manifest.files:
        problem = _file_problem(file)
        if problem is not None:
            return f"{file.name!r}: {problem}"
    sizes = {file.name: file.size for file in manifest.files}
    if len(sizes) != len(manifest.files):
        return "two files of one name"
    names = {tensor.name for tensor in manifest.tensors}
    for tensor in manifest.tensors:
        if not 0 <= tensor.offset <= tensor.offset + tensor.length <= sizes.get(tensor.file, -1):
            return f"tensor {tensor.name!r} lies outside its file"
    for tied in manifest.tied:
        if tied.same_as not in names or tied.name in names:
            return f"tied {tied.name!r} = {tied.same_as!r}"
    if manifest.content_digest != content_digest(manifest.files):
        return "content digest and chunk digests disagree"
    return _delta_problem(manifest) or _probe_problem(manifest.probe)


def _file_problem(file: File) -> str | None:
    if _FILE_NAME.fullmatch(file.name) is None or file.name == MANIFEST:
        return "not a usable file name"
    end = 0
    for chunk in file.chunks:
        if chunk.offset != end or not 0 < chunk.length <= MAX_CHUNK_BYTES:
            return f"chunk of {chunk.length} bytes at {chunk.offset}, expected one at {end}"
        if _DIGEST.fullmatch(chunk.blake3) is None:
            return f"digest {chunk.blake3!r}"
        end += chunk.length
    return None if end == file.size else f"chunks of {end} bytes, file of {file.size}"


def _delta_problem(manifest: Manifest) -> str | None:
    names = {file.name for file in manifest.files}
    later = manifest.version
    for delta in manifest.deltas:
        problem = _file_problem(delta.file)
        if problem is not None:
            return f"{delta.file.name!r}: {problem}"
        if delta.target not in names or not 0 <= delta.base < later:
            return f"a delta of {delta.target!r} from version {delta.base} to {later}"
        if _DIGEST.fullmatch(delta.base_digest) is None:
            return f"digest {delta.base_digest!r}"
        later = delta.base
    if len({file.name for file in manifest.all_files}) != len(manifest.all_files):
        return "two files of one name"
    return None


def _probe_problem(probe: Probe) -> str | None:
    if not probe.token_ids or not probe.next_token_ids:
        return "an empty probe proves nothing"
    if len(probe.next_token_ids) != len(probe.logprobs):
        return f"probe of {len(probe.next_token_ids)} tokens and {len(probe.logprobs)} logprobs"
    if not all(math.isfinite(x) for x in probe.logprobs):
        return "probe with a logprob that is no number"
    if not (math.isfinite(probe.tolerance) and probe.tolerance >= 0):
        return f"probe tolerance {probe.tolerance}"
    return None


_MAX_HASH_THREADS = 8


def describe_file(path: Path, chunk_bytes: int) -> File:
    """Return the file's size and chunks; large files are hashed by several threads."""
    size = path.stat().st_size
    ranges = [(at, min(chunk_bytes, size - at)) for at in range(0, size, chunk_bytes)]
    fd = os.open(path, os.O_RDONLY)
    try:
        threads = min(len(ranges), os.cpu_count() or 1, _MAX_HASH_THREADS)
        if threads <= 1:
            chunks = [_describe_chunk(fd, *r) for r in ranges]
        else:
            with ThreadPoolExecutor(threads) as pool:
                chunks = list(pool.map(lambda r: _describe_chunk(fd, *r), ranges))
    finally:
        os.close(fd)
    return File(path.name, size, tuple(chunks))


def damage(folder: Path, manifest: Manifest, *, has_all_deltas: bool = True) -> str | None:
    """Return which file of the version in `folder`, and where, is not as the manifest has it; None: all are.

    Reads and hashes everything, like `describe_file`. `has_all_deltas`: False for a receiver's folder, which
    has the deltas that it pulled.
    """
    needed = {file.name for file in (manifest.all_files if has_all_deltas else manifest.files)}
    for file in manifest.all_files:
        path = folder / file.name
        if file.name not in needed and not path.exists():
            continue
        try:
            found = describe_file(path, file.chunks[0].length if file.chunks else 1)
        except FileNotFoundError:
            return f"{path} is missing"
        if found.size != file.size:
            return f"{path} has {found.size} bytes instead of {file.size}"
        wrong = [i for i, chunk in enumerate(file.chunks) if chunk != found.chunks[i]]
        if wrong:
            return f"chunk {wrong[0]} of {path} (from byte {file.chunks[wrong[0]].offset} on) is damaged"
    return None


def _describe_chunk(fd: int, offset: int, length: int) -> Chunk:
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise OSError(errno.EIO, "file changed while it was digested")
    return Chunk(offset, length, digest(data))
