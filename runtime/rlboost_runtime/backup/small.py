"""The small files of a run: each is copied whole once it has changed, under a name of its own, so that a
state means exactly the content that it was written for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from rlboost_runtime.backup.layout import WholeCopy, whole_key
from rlboost_runtime.billing.ledger_file import in_one_file
from rlboost_runtime.run.folder import RunFolder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LEDGER = "ledger.sqlite"
SNAPSHOT = "events.snapshot"
_MOST_BYTES_AT_ONCE = 8 * 1024 * 1024
_SINGLE = ("job.yaml", "job.json", "plan.json", "forked.json", "notified.json", "cloud/bought.json")
_MANIFESTS = ("weights/v*/manifest.json", "weights/former/v*.json", "former_versions/v*.json")


def small_files(run: RunFolder) -> Iterator[str]:
    """Yield the names of the run's small files that are there, except for ledger and snapshot."""
    yield from (name for name in _SINGLE if (run.path / name).is_file())
    for path in sorted(run.files.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(run.files).parts):
            yield path.relative_to(run.path).as_posix()


def version_manifests(run: RunFolder) -> Iterator[str]:
    """Yield the names of the manifests of the weight versions that are there, or were on a lost head."""
    for pattern in _MANIFESTS:
        yield from (path.relative_to(run.path).as_posix() for path in sorted(run.path.glob(pattern)))


class SmallFiles:
    """Copies them, and knows what is there. One thread."""

    def __init__(self, run: RunFolder, head: int, known: dict[str, WholeCopy]) -> None:
        """`known`: what a former process copied."""
        self.copies = dict(known)
        self.replaced: list[str] = []
        """Objects that no state names once the next one is written."""
        self._run = run
        self._head = head
        self._looks: dict[str, object] = {}

    def copy(self, bucket: ObjectStore, name: str, number: int) -> int:
        """Copy a file if it has changed; return the bytes sent. `number`: of the round."""
        path = self._run.path / name
        if name == LEDGER:
            looks = (_look(path), _look(path.with_name(f"{name}-wal")))
            return self._put(bucket, name, number, looks, lambda: in_one_file(path)) if path.exists() else 0
        look = _look(path)
        if look is None:
            return 0
        if look[1] > _MOST_BYTES_AT_ONCE:
            return self._put_large(bucket, name, number, look, path)
        return self._put(bucket, name, number, look, path.read_bytes)

    def forget(self, names: set[str]) -> None:
        """Drop what is not among `names` any more."""
        for name in self.copies.keys() - names:
            self.replaced.append(self.copies.pop(name).key)
            self._looks.pop(name, None)

    def _put(
        self, bucket: ObjectStore, name: str, number: int, look: object, read: Callable[[], bytes]
    ) -> int:
        if self._looks.get(name) == look:
            return 0
        data = read()
        digest = hashlib.sha256(data).hexdigest()
        if self._is_there(name, digest):
            self._looks[name] = look
            return 0
        copy = WholeCopy(whole_key(self._head, name, number), len(data), digest)
        obstore.put(bucket, copy.key, data, use_multipart=False)
        self._keep(name, copy, look)
        return len(data)

    def _put_large(self, bucket: ObjectStore, name: str, number: int, look: object, path: Path) -> int:
        if self._looks.get(name) == look:
            return 0
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if self._is_there(name, digest):
            self._looks[name] = look
            return 0
        copy = WholeCopy(whole_key(self._head, name, number), path.stat().st_size, digest)
        obstore.put(bucket, copy.key, path)
        self._keep(name, copy, look)
        return copy.size

    def _is_there(self, name: str, digest: str) -> bool:
        known = self.copies.get(name)
        return known is not None and known.sha256 == digest

    def _keep(self, name: str, copy: WholeCopy, look: object) -> None:
        if (known := self.copies.get(name)) is not None and known.key != copy.key:
            self.replaced.append(known.key)
        self.copies[name], self._looks[name] = copy, look


def _look(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the file; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
