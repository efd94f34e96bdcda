"""Weight versions at the head: written once by the trainer, read by the weight server.

::

    weights/v000012/          a complete version; see `weights.manifest` for its files
    weights/v000012/.lease    locked shared (flock) by every reader of the version
    weights/.building-*/      a version being built (its builder holds the lease) or deleted
    former_versions/          manifests of versions whose files may be gone, on the disk: of a lost head, and
                              where versions lie in main memory of each before it is announced

Guarantees: a folder named by a version is complete and never changes, and it or its manifest is durable: no
number is given to other weights; a failed or killed
publication leaves the other versions as they were, and what remains of it is removed by the next one; a
version with a reader is never deleted. Locks are the kernel's, so that they end with the process that holds
them, and several processes may use one store.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlboost_runtime.errors import ProtocolError, RuntimeFault, is_disk_full
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import sync_path, write_atomically
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import (
    DELTA_PREFIX,
    MANIFEST,
    File,
    Manifest,
    Probe,
    Tied,
    describe_file,
)

if TYPE_CHECKING:
    from rlboost_runtime.weights.delta.file import Finder

log = logging.getLogger(__name__)

LEASE = ".lease"
FORMER = "former_versions"
"""Folder beside the store, with manifests of versions whose files may be gone."""
KEPT_MANIFESTS = 64
"""Of these, the newest: more than steps pass between two checkpoints that are kept."""
_OLD_FORMER = "former"
"""Within the store, in earlier versions of this project."""
CHUNK_BYTES = 4 * 1024 * 1024
_BUILDING = ".building-"
_DAMAGED = ".damaged"


class VersionGone(LookupError):
    """The store has no such version, or not any more."""


class ReadHold:
    """A reader's hold on a version: it is not deleted before `release`."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd: int | None = fd

    def release(self) -> None:
        """Let go; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> ReadHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WeightStore:
    """The versions in one folder; the newest `keep` stay; files are digested in chunks of `chunk_bytes`.

    With `max_deltas` above 0 a new version also gets deltas from up to so many versions before it, where they
    pay (`weights.delta.file`); `finder` finds what changed, None: on the CPU.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        max_deltas: int = 0,
        finder: Finder | None = None,
    ) -> None:
        if keep < 1 or not 0 < chunk_bytes <= manifests.MAX_CHUNK_BYTES or max_deltas < 0:
            raise ValueError(f"keep {keep}, chunk_bytes {chunk_bytes}, max_deltas {max_deltas}")
        self.folder = folder
        self.keep = keep
        self.chunk_bytes = chunk_bytes
        self.max_deltas = max_deltas
        self._finder = finder

    def versions(self) -> list[int]:
        """Return the numbers of all complete versions, ascending."""
        if not self.folder.is_dir():
            return []
        numbers = (manifests.parse_version_name(path.name) for path in self.folder.iterdir())
        return sorted(n for n in numbers if n is not None)

    def last_number(self) -> int:
        """Return the highest number that a version has or, before it was found damaged or its head was lost,
        had; -1: none."""
        folders = (self.folder, self.folder.with_name(FORMER))
        names = [path.name.removesuffix(_DAMAGED) for each in folders for path in each.glob("v*")]
        names += [path.stem for path in self._former_paths()]
        return max((n for name in names if (n := manifests.parse_version_name(name)) is not None), default=-1)

    def former(self) -> list[Manifest]:
        """Return versions whose files may be gone, newest first: a lost head's, and those that were in main
        memory."""
        return [manifests.decode_manifest(path.read_bytes()) for path in self._former_paths()]

    def retire(self) -> None:
        """Note the manifest of every version, then delete the versions; none may be in use."""
        self.folder.with_name(FORMER).mkdir(mode=0o700, exist_ok=True)
        for version in self.versions():
            with suppress(ProtocolError):
                self._note(manifests.read_manifest(self.path(version)))
        for path in self.folder.glob(f"{_OLD_FORMER}/v*.json"):
            self._note(manifests.decode_manifest(path.read_bytes()))
        for path in self.folder.iterdir():
            if path.name.endswith(_DAMAGED):  # its number stays taken
                os.rename(path, self.folder.with_name(FORMER) / path.name)
            else:
                _remove(path)

    def _former_paths(self) -> list[Path]:
        folders = (self.folder.with_name(FORMER), self.folder / _OLD_FORMER)
        return sorted((p for each in folders for p in each.glob("v*.json")), key=_by_name, reverse=True)

    def _note(self, manifest: Manifest) -> None:
        """Keep a manifest on the disk, so that its number stays that of its weights."""
        folder = self.folder.with_name(FORMER)
        folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{manifests.version_name(manifest.version)}.json"
        write_atomically(folder / name, manifests.encode_manifest(manifest), durably=True)
        for path in sorted(folder.glob("v*.json"), key=_by_name)[:-KEPT_MANIFESTS]:
            path.unlink()

    def latest(self) -> int | None:
        """Return the highest version, None where there is none."""
        return max(self.versions(), default=None)

    def path(self, version: int) -> Path:
        """Return the folder of a version; it need not exist."""
        return self.folder / manifests.version_name(version)

    def read(self, version: int) -> ReadHold:
        """Hold a version for reading. Raises `VersionGone`."""
        folder = self.path(version)
        fd = try_lock(folder / LEASE, fcntl.LOCK_SH)
        if fd is None:
            raise VersionGone(f"no version {version}")
        return ReadHold(folder, fd)

    def publish(
        self, version: int, write: Callable[[Path], None], probe: Probe, tied: Sequence[Tied] = ()
    ) -> Manifest:
        """Build, digest and publish a version, then delete what is old; blocks, also for the disk.

        `write` gets an empty folder and puts `model.safetensors`, `config.json`, `generation_config.json`
        there; a link to a file of the newest version is not read again. Publishing a version again with the
        same content returns the existing one.

        Raises `RuntimeFault` where the content differs or the disk is full, `ProtocolError` where what was
        written makes no version, and whatever `write` raises. After an error the store is as before.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.collect()
        try:
            with self._building() as folder:
                write(folder)
                manifest = self._describe(version, folder, probe, tied)
                if self.max_deltas:
                    manifest = self._with_deltas(folder, manifest)
                (folder / MANIFEST).write_bytes(manifests.encode_manifest(manifest))
                if self.folder.is_symlink():
                    self._note(manifest)
                else:
                    _sync_all(folder)
                manifest = self._accept(folder, manifest)
        except Exception as exc:
            if is_disk_full(exc):
                raise self._full(version) from exc
            raise
        self.collect()
        return manifest

    def _full(self, version: int) -> RuntimeFault:
        then = "then type rlboost launch RUN --resume: it continues from its last checkpoint"
        if self.folder.is_symlink():
            return RuntimeFault(
                f"no space left in {self.folder.resolve()} for weight version {version}",
                f"write weights.keep_in: disk in the job, {then}",
            )
        return RuntimeFault(
            f"no space left on disk for weight version {version} in {self.folder}",
            f"free some disk space, {then}",
        )

    def put_damaged_aside(self) -> list[str]:
        """Rename versions that are not as they were published to NAME.damaged, so that nobody loads them;
        return what is wrong with each. Reads everything."""
        problems = []
        for version in self.versions():
            with suppress(VersionGone), self.read(version) as hold:
                problem = _damage(hold.folder)
                if problem is None:
                    continue
                problems.append(problem)
                event(log, "weights.damaged", level=logging.ERROR, version=version, problem=problem)
                aside = hold.folder.with_name(f"{hold.folder.name}{_DAMAGED}")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(hold.folder, aside)
        return problems

    def collect(self) -> list[int]:
        """Delete versions beyond the newest `keep` and remains of killed builds, except those in use.

        Returns the versions deleted.
        """
        if not self.folder.is_dir():
            return []
        for path in self.folder.glob(f"{_BUILDING}*"):
            _delete(path)
        return [version for version in self.versions()[: -self.keep] if _delete(self.path(version))]

    @contextmanager
    def _building(self) -> Iterator[Path]:
        """Yield a new folder that is ours while the context lasts, and gone after it unless renamed."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=_BUILDING))
        fd = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # shared: readers may come the moment it has its final name
            yield folder
        finally:
            _remove(folder)
            os.close(fd)

    def _describe(self, version: int, folder: Path, probe: Probe, tied: Sequence[Tied]) -> Manifest:
        paths = sorted(path for path in folder.iterdir() if path.name != LEASE)
        files = tuple(self._known(path) or describe_file(path, self.chunk_bytes) for path in paths)
        return Manifest(
            schema=manifests.SCHEMA,
            version=version,
            encoding="full",
            base=None,
            files=files,
            tensors=tuple(t for p in paths if p.suffix == ".safetensors" for t in manifests.read_tensors(p)),
            tied=tuple(tied),
            probe=probe,
            content_digest=manifests.content_digest(files),
            created_at=time.time(),
        )

    def _known(self, path: Path) -> File | None:
        """Return the newest version's description of a file that is a link to its own."""
        newest = self.latest()
        if newest is None or path.stat().st_nlink == 1:
            return None
        try:
            if not path.samefile(self.path(newest) / path.name):
                return None
            files = manifests.read_manifest(self.path(newest)).files
        except (ProtocolError, FileNotFoundError):
            return None
        return next((file for file in files if file.name == path.name), None)

    def _with_deltas(self, folder: Path, manifest: Manifest) -> Manifest:
        earlier = [version for version in self.versions() if version < manifest.version]
        if not earlier or not _is_mostly_16_bit(manifest):
            return manifest
        from rlboost_runtime.weights.delta.file import add_deltas  # numba: a second to import

        try:
            with self.read(earlier[-1]) as hold:
                return add_deltas(
                    hold.folder, folder, manifest, self.max_deltas, self.chunk_bytes, self._finder
                )
        except VersionGone:
            return manifest
        except OSError as exc:
            if not is_disk_full(exc):
                raise
            event(
                log, "weights.delta_left_out", level=logging.WARNING, version=manifest.version,
                problem="no space left on disk for it: the version is offered whole",
            )  # fmt: skip
            for path in folder.glob(f"{DELTA_PREFIX}*"):
                path.unlink()
            return manifest

    def _accept(self, built: Path, manifest: Manifest) -> Manifest:
        """Give the built folder its final name, or return the version that has this name already."""
        final = self.path(manifest.version)
        try:
            os.rename(built, final)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            sync_path(self.folder)
            return manifest
        existing = manifests.read_manifest(final)
        if existing.content_digest != manifest.content_digest:
            raise RuntimeFault(
                f"weight version {manifest.version} is published already with other content",
                "a published version never changes: publish the new weights under the next number",
            )
        return existing


def _by_name(path: Path) -> tuple[int, str]:
    return len(path.name), path.name


def _damage(folder: Path) -> str | None:
    try:
        return manifests.damage(folder, manifests.read_manifest(folder))
    except ProtocolError as problem:
        return f"{folder / MANIFEST}: {problem.problem}"


def _is_mostly_16_bit(manifest: Manifest) -> bool:
    """Return True if deltas may pay: a training step changes nearly every float32."""
    short = sum(tensor.length for tensor in manifest.tensors if tensor.dtype in ("BF16", "F16"))
    return 2 * short > sum(tensor.length for tensor in manifest.tensors)


def try_lock(path: Path, kind: int, flags: int = os.O_RDWR) -> int | None:
    """Open the file and lock it without waiting; None if it is gone or locked by others.

    A lock counts only on the file that still has the name: a version is locked before it is deleted.
    """
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _delete(folder: Path) -> bool:
    """Delete the folder unless its lease is held; return True if it was deleted."""
    fd = try_lock(folder / LEASE, fcntl.LOCK_EX)
    if fd is None:
        return False
    try:
        doomed = folder
        if not folder.name.startswith(_BUILDING):  # a half-deleted version must not look like one
            doomed = folder.with_name(f"{_BUILDING}{folder.name}-{secrets.token_hex(4)}")
            os.rename(folder, doomed)
        _remove(doomed)
    finally:
        os.close(fd)
    return True


def _remove(folder: Path) -> None:
    """Remove what there is of the folder; its lease goes last, so that a killed removal is taken up again."""
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LEASE:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for path in folder.iterdir():
        sync_path(path)
    sync_path(folder)
