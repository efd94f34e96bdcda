"""A version that is being pulled: what is on disk already, and how it becomes a version.

::

    FOLDER/v000012.part/           locked (flock) by its one puller
    FOLDER/v000012.part/.verified  a byte per chunk of the manifest, 1: written and verified

The file of a whole delta lies beside the version's own, also once it is a version: others may want it. A
large file that is the same in a version that is here already (the frozen weights under adapters) is a link
to it.

Guarantees: only verified bytes are written; a chunk is marked after its bytes are; marks are checked against
the bytes when a pull is taken up again, so a crash at any point costs at most the chunks in flight;
`FOLDER/v000012` appears whole, by one rename. A full disk shows at the start, not in the middle.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run.folder import write_atomically
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import MANIFEST, Chunk, Delta, File, Manifest
from rlboost_runtime.weights.store.store import try_lock

PART = ".part"
VERIFIED = ".verified"
LEAST_LINKED_BYTES = 1 << 20
"""A smaller file is fetched again: that takes one request."""
LOCK_S = 5.0
"""How long to wait until a former puller of the same version has ended."""
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
"""A file system that has no links between the two."""
_LOCK_RETRY_S = 0.05
_HASH_THREADS = 2

Seen = Callable[[int], None]
"""Called with the number of bytes that were read and verified on disk: slow, but progress."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk and where it belongs; `index` counts through all chunks of the manifest."""

    index: int
    file: File
    chunk: Chunk


def pieces_of(manifest: Manifest) -> list[Piece]:
    """Return all chunks of a version, file by file."""
    return all_pieces(manifest)[: sum(len(file.chunks) for file in manifest.files)]


def all_pieces(manifest: Manifest) -> list[Piece]:
    """Return all chunks of a version and, after them, those of its deltas."""
    pieces = [(file, chunk) for file in manifest.all_files for chunk in file.chunks]
    return [Piece(i, file, chunk) for i, (file, chunk) in enumerate(pieces)]


def _unseen(_: int) -> None:
    """Ignore it."""


def complete_version(folder: Path, manifest: Manifest, seen: Seen = _unseen) -> Path | None:
    """Return the folder of this very version where every byte of it is here already; reads all of it."""
    path = folder / manifests.version_name(manifest.version)
    try:
        if manifests.read_manifest(path).content_digest != manifest.content_digest:
            return None
        sizes = [(path / file.name).stat().st_size == file.size for file in manifest.files]
    except (ProtocolError, OSError):
        return None
    fds = _open_files(path, manifest.files, os.O_RDONLY)
    try:
        return path if all(sizes) and all(_verify(fds, pieces_of(manifest), seen)) else None
    finally:
        _close(fds)


class PartFolder:
    """The folder of one pull, from `part_folder`. `write` may be called by several threads."""

    def __init__(self, path: Path, manifest: Manifest, marks: int, seen: Seen = _unseen) -> None:
        self._seen = seen
        self._path = path
        self._manifest = manifest
        self._marks = marks
        self._fds: dict[str, int] = {}
        self.linked_bytes = 0
        """Of files that a version that is here has too."""

    def prepare(self, versions: Sequence[Path] = ()) -> list[Piece]:
        """Reserve the disk space, verify what is marked, return what is still to fetch.

        `versions`: others that are here, whose files serve where they are the same; those were verified when
        they came. Raises `RuntimeFault`, like `write`, where the disk is full or fails.
        """
        with _explaining_disk_errors(self._path):
            self._drop_other_content()
            linked = self._link_unchanged(versions)
            files = [file for file in self._manifest.files if file.name not in linked]
            own = [piece for piece in pieces_of(self._manifest) if piece.file.name not in linked]
            return self._take_up(files, own)

    def _link_unchanged(self, versions: Sequence[Path]) -> set[str]:
        """Link the files that one of `versions` has too, mark their pieces, return their names."""
        wanted = {file.name: file for file in self._manifest.files if file.size >= LEAST_LINKED_BYTES}
        linked: set[str] = set()
        for folder in versions if wanted else ():
            try:
                there = manifests.read_manifest(folder).files
            except ProtocolError:
                continue
            for file in there:
                if file == wanted.get(file.name) and file.name not in linked and self._link(file, folder):
                    linked.add(file.name)
        self.linked_bytes = sum(wanted[name].size for name in linked)
        self._mark(linked)
        return linked

    def _mark(self, names: set[str]) -> None:
        """Mark all pieces of these files."""
        for piece in all_pieces(self._manifest):
            if piece.file.name in names:
                os.pwrite(self._marks, b"\1", piece.index)

    def _link(self, file: File, folder: Path) -> bool:
        if not _lies_in(folder, file):
            return False
        target = self.file(file.name)
        try:
            target.unlink(missing_ok=True)
            os.link(folder / file.name, target)
        except FileNotFoundError:
            return False
        except OSError as exc:
            if exc.errno in NO_LINKS:
                return False
            raise
        return True

    def prepare_deltas(self, deltas: Sequence[Delta]) -> list[Piece]:
        """Do the same as `prepare` for the files of these deltas; call it after that."""
        names = {delta.file.name for delta in deltas}
        with _explaining_disk_errors(self._path):
            return self._take_up(
                [delta.file for delta in deltas],
                [piece for piece in self._delta_pieces() if piece.file.name in names],
            )

    def missing(self) -> list[Piece]:
        """Return the version's own pieces that are still to fetch; after `prepare`."""
        return self._unmarked(pieces_of(self._manifest))

    def _delta_pieces(self) -> list[Piece]:
        return all_pieces(self._manifest)[len(pieces_of(self._manifest)) :]

    def file(self, name: str) -> Path:
        """Return where a file of the version lies."""
        return self._path / name

    def _take_up(self, files: Sequence[File], pieces: list[Piece]) -> list[Piece]:
        self._fds |= _open_files(self._path, files, os.O_RDWR | os.O_CREAT)
        for file in files:
            _allocate(self._fds[file.name], file.size)
        unmarked = {piece.index for piece in self._unmarked(pieces)}
        marked = [piece for piece in pieces if piece.index not in unmarked]
        for piece, good in zip(marked, _verify(self._fds, marked, self._seen), strict=True):
            if not good:
                os.pwrite(self._marks, b"\0", piece.index)
        return self._unmarked(pieces)

    def _unmarked(self, pieces: list[Piece]) -> list[Piece]:
        marks = os.pread(self._marks, len(all_pieces(self._manifest)), 0)
        return [piece for piece in pieces if not marks[piece.index]]

    def write(self, piece: Piece, data: memoryview) -> None:
        """Keep the verified bytes of a piece."""
        fd, at = self._fds[piece.file.name], piece.chunk.offset
        with _explaining_disk_errors(self._path):
            while data:
                count = os.pwrite(fd, data, at)
                data, at = data[count:], at + count
            os.pwrite(self._marks, b"\1", piece.index)

    def adopt(self, source: Path) -> Path | None:
        """Become the version by links to the files in `source`, and to those deltas that it has; returns its
        folder, None where the file system has no links between the two, or a file has not its size there."""
        files = self._manifest.files
        with _explaining_disk_errors(self._path):
            if not all(_lies_in(source, file) for file in files):
                return None
            self._drop_other_content()
            if not all(self._link(file, source) for file in files):
                return None
            deltas = (delta.file for delta in self._manifest.deltas)
            self._mark({file.name for file in deltas if self._link(file, source)})
        return self.finish()

    def finish(self) -> Path:
        """Turn the complete part into the version, without half-fetched deltas; returns its folder."""
        self.close()
        final = self._path.with_suffix("")
        with _explaining_disk_errors(self._path):
            for name in {piece.file.name for piece in self._unmarked(self._delta_pieces())}:
                self.file(name).unlink(missing_ok=True)
            shutil.rmtree(final, ignore_errors=True)  # not this version's bytes: `complete_version` looked
            os.rename(self._path, final)
            (final / VERIFIED).unlink()
        return final

    def close(self) -> None:
        """Close the files; idempotent."""
        _close(self._fds)
        self._fds = {}

    def _drop_other_content(self) -> None:
        """Keep what a former pull left only if it is of the same content."""
        try:
            former, now = manifests.read_manifest(self._path), self._manifest
            same = (former.content_digest, former.deltas) == (now.content_digest, now.deltas)
        except ProtocolError:
            same = False
        num_chunks = len(all_pieces(self._manifest))
        if not same or os.fstat(self._marks).st_size != num_chunks:
            os.ftruncate(self._marks, 0)
            for path in self._path.iterdir():
                if path.name != VERIFIED:
                    path.unlink()
            write_atomically(self._path / MANIFEST, manifests.encode_manifest(self._manifest))
            os.ftruncate(self._marks, num_chunks)


@contextmanager
def part_folder(folder: Path, manifest: Manifest, seen: Seen = _unseen) -> Iterator[PartFolder]:
    """Lock, create or take up the part folder of a version. Raises `RuntimeFault`: disk full, or in use."""
    path = folder / (manifests.version_name(manifest.version) + PART)
    marks = _lock_waiting(path)
    try:
        part = PartFolder(path, manifest, marks, seen)
        try:
            yield part
        finally:
            part.close()
    finally:
        os.close(marks)


def prune(folder: Path, version: int, keep: int) -> None:
    """Delete versions before `version` beyond the newest `keep`, and parts that no process is pulling."""
    numbers = [n for path in folder.iterdir() if (n := manifests.parse_version_name(path.name)) is not None]
    for number in sorted(n for n in numbers if n <= version)[:-keep]:
        shutil.rmtree(folder / manifests.version_name(number), ignore_errors=True)
    for path in folder.glob(f"v*{PART}"):
        fd = _try_lock(path)
        if fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def _lock_waiting(path: Path) -> int:
    deadline = time.monotonic() + LOCK_S
    while True:
        with _explaining_disk_errors(path):
            with suppress(FileExistsError):  # another process has just completed and renamed it
                path.mkdir(parents=True, exist_ok=True)
            fd = _try_lock(path)
        if fd is not None:
            return fd
        if time.monotonic() > deadline:
            raise RuntimeFault(f"another process is pulling into {path}", "end it, or wait until it is done")
        time.sleep(_LOCK_RETRY_S)


def _try_lock(path: Path) -> int | None:
    """Lock the part folder and return the open file of marks; None if it is locked or gone."""
    return try_lock(path / VERIFIED, fcntl.LOCK_EX, os.O_RDWR | os.O_CREAT)


def _open_files(path: Path, files: Sequence[File], flags: int) -> dict[str, int]:
    fds: dict[str, int] = {}
    try:
        for file in files:
            fds[file.name] = os.open(path / file.name, flags, 0o600)
    except BaseException:
        _close(fds)
        raise
    return fds


def _close(fds: dict[str, int]) -> None:
    for fd in fds.values():
        os.close(fd)


def _lies_in(folder: Path, file: File) -> bool:
    try:
        return (folder / file.name).stat().st_size == file.size
    except FileNotFoundError:
        return False


def _allocate(fd: int, size: int) -> None:
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)
    if size:
        os.posix_fallocate(fd, 0, size)


def _verify(fds: dict[str, int], pieces: list[Piece], seen: Seen) -> list[bool]:
    """Return for each piece whether its bytes are on disk."""

    def is_good(piece: Piece) -> bool:
        data = os.pread(fds[piece.file.name], piece.chunk.length, piece.chunk.offset)
        seen(len(data))
        return manifests.digest(data) == piece.chunk.blake3

    if len(pieces) < 2:
        return [is_good(piece) for piece in pieces]
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(is_good, pieces))


@contextmanager
def _explaining_disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            problem, remedy = "no space left on disk for weights", "use a machine with a larger disk"
        else:
            problem, remedy = f"cannot write weights ({exc.strerror})", "check the machine's disk"
        raise RuntimeFault(f"{problem} in {path}", remedy) from exc
