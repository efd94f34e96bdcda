"""What a weight server may hand out: the versions of a head's store, or what a machine has pulled.

Guarantees: only files that a version's manifest names are found; a version of a store is held while it is
read and a little longer; of a version that is still being pulled only verified chunks are handed out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import MANIFEST, File, Manifest, read_manifest
from rlboost_runtime.weights.store.part_folder import PART, VERIFIED
from rlboost_runtime.weights.store.store import ReadHold, VersionGone, WeightStore


@dataclass(frozen=True, slots=True)
class Entry:
    """A version that may be read now."""

    folder: Path
    manifest: Manifest
    is_part: bool = False

    def file(self, name: str) -> Path | None:
        """Return where a file of the version lies, None where the version has no such file."""
        known = name == MANIFEST or any(file.name == name for file in self.manifest.all_files)
        return self.folder / name if known else None

    def marks(self) -> bytes:
        """Return a byte per chunk of the manifest, 1 where it is here."""
        if self.is_part:
            try:
                return (self.folder / VERIFIED).read_bytes()
            except FileNotFoundError:  # complete since
                return Entry(self.folder.with_suffix(""), self.manifest).marks()
        return b"".join(
            (b"\1" if (self.folder / file.name).exists() else b"\0") * len(file.chunks)
            for file in self.manifest.all_files
        )

    def has(self, name: str, start: int, end: int) -> bool:
        """Return True if bytes [start, end) of a file are here and verified."""
        if not self.is_part or name == MANIFEST:
            return True
        marks = self.marks()
        at = 0
        for file in self.manifest.all_files:
            if file.name == name:
                return all(marks[at + i : at + i + 1] == b"\1" for i in _chunks(file, start, end))
            at += len(file.chunks)
        return False


@dataclass(slots=True)
class _Held:
    hold: ReadHold
    entry: Entry
    num_users: int = 0
    idle_since: float = 0.0


@dataclass(slots=True)
class StoreCatalog:
    """A head's store. Versions stay held for `linger_s` after their last request."""

    store: WeightStore
    linger_s: float
    _held: dict[int, _Held] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def latest(self) -> int | None:
        """Return the newest version of the store."""
        return self.store.latest()

    @contextmanager
    def reading(self, version: int) -> Iterator[Entry]:
        """Hold the version, which no publication deletes meanwhile. Raises `VersionGone`, `ProtocolError` on
        a broken manifest."""
        with self._lock:
            held = self._held.get(version)
            if held is None:
                held = self._held[version] = self._hold(version)
            held.num_users += 1
        try:
            yield held.entry
        finally:
            with self._lock:
                held.num_users -= 1
                held.idle_since = time.monotonic()

    def awaits(self, version: int) -> bool:
        """Return True while a resumed trainer has yet to publish again what the store had in main memory."""
        return self.store.latest() is None and version <= self.store.last_number()

    def tidy(self) -> None:
        """Release versions that were not requested lately."""
        with self._lock:
            before = time.monotonic() - self.linger_s
            idle = [v for v, held in self._held.items() if not held.num_users and held.idle_since < before]
            for version in idle:
                self._held.pop(version).hold.release()

    def close(self) -> None:
        """Release all versions."""
        with self._lock:
            for held in self._held.values():
                held.hold.release()
            self._held.clear()

    def _hold(self, version: int) -> _Held:
        hold = self.store.read(version)
        try:
            return _Held(hold, Entry(hold.folder, read_manifest(hold.folder)))
        except BaseException:
            hold.release()
            raise


class PulledCatalog:
    """The folders in which the agents of a machine pull; whatever is there, complete or not."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self._manifests: dict[Path, tuple[int, int, Manifest]] = {}
        # inode and time of the file, and what is in it: receivers ask several times a second

    def awaits(self, version: int) -> bool:
        """Return False: nothing that was deleted here comes back."""
        return False

    def latest(self) -> int | None:
        """Return the newest complete version."""
        paths = [path for folder in self._folders if folder.is_dir() for path in folder.iterdir()]
        numbers = (manifests.parse_version_name(path.name) for path in paths)
        return max((n for n in numbers if n is not None), default=None)

    @contextmanager
    def reading(self, version: int) -> Iterator[Entry]:
        """Find the version. Files that are deleted meanwhile can still be read by who has opened them."""
        yield self._find(manifests.version_name(version))

    def tidy(self) -> None:
        """Forget manifests of versions and parts that are not here any more: large ones take megabytes."""
        for path in list(self._manifests):  # a list: receivers ask meanwhile
            if not path.exists():
                self._manifests.pop(path, None)

    def close(self) -> None:
        """Nothing is held."""

    def _find(self, name: str) -> Entry:
        for suffix in ("", PART):
            for folder in self._folders:
                path = folder / f"{name}{suffix}"
                manifest = self._manifest(path)
                if manifest is None:
                    continue
                if suffix == "" or _is_laid_out(path, manifest):
                    return Entry(path, manifest, is_part=suffix != "")
        raise VersionGone(f"nothing of {name} here")

    def _manifest(self, path: Path) -> Manifest | None:
        try:
            now = (path / MANIFEST).stat()
            known = self._manifests.get(path)
            if known is None or known[:2] != (now.st_ino, now.st_mtime_ns):
                known = self._manifests[path] = (now.st_ino, now.st_mtime_ns, read_manifest(path))
        except (OSError, ProtocolError):
            self._manifests.pop(path, None)
            return None
        return known[2]


Catalog = StoreCatalog | PulledCatalog
"""Finds versions. Methods may be called by any thread; `tidy` is called at short intervals."""


def _is_laid_out(path: Path, manifest: Manifest) -> bool:
    """Return True if the marks of a part belong to this manifest."""
    try:
        return os.stat(path / VERIFIED).st_size == sum(len(file.chunks) for file in manifest.all_files)
    except FileNotFoundError:
        return False


def _chunks(file: File, start: int, end: int) -> Iterator[int]:
    """Yield the numbers of the chunks that bytes [start, end) lie in."""
    for i, chunk in enumerate(file.chunks):
        if chunk.offset < end and start < chunk.offset + chunk.length:
            yield i
