"""A bucket (s3, gs, az, or file:// on this machine) as a source of versions, and how the head fills it.

::

    URL/files/DIGEST            a file of any version, named by its content and written once
    URL/v000012/manifest.json   what the version consists of; written once all of its files are there

URL is a run's own, below that of the job's `weights.bucket` (`RunFolder.place_in`).

The head uploads what is not there yet, so that frozen weights travel once however many versions have them;
receivers of any cloud read ranges. Others may be able to write to the bucket, so nothing from it counts
before its digest is that of the manifest, and the manifest not before its content digest is the head's
(`weights.pull.pull`); the bucket's own manifest only names files. Credentials are those that the machine has:
the SDKs' usual environment variables, files and instance roles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run.bucket import first_line, open_bucket
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import MANIFEST, MAX_MANIFEST_BYTES, File, Manifest
from rlboost_runtime.weights.pull.range_client import Absent, Damaged, Fill, Unusable

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

UPLOAD_TIMEOUT_S = 600.0
"""Longest time that one part of an upload may take, retries included."""
LEAST_PART_BYTES = 8 * 1024 * 1024
MOST_PARTS = 9000
"""Of one upload; S3 takes 10,000."""
UPLOADS = 4
"""Parts in memory at once."""
_FILES = "files"

T = TypeVar("T")


def upload(bucket: ObjectStore, folder: Path) -> int:
    """Upload what the bucket lacks of the version in `folder`, held by the caller; return the bytes sent.

    Raises `RuntimeFault`.
    """
    manifest = manifests.read_manifest(folder)
    sent = 0
    try:
        for file in manifest.all_files:
            if not _has(bucket, file):
                sent += _put(bucket, _path(file), folder / file.name)
        return sent + _put(bucket, _manifest_path(manifest.version), folder / MANIFEST)
    except (exceptions.BaseError, OSError) as exc:
        raise RuntimeFault(
            f"version {manifest.version} cannot be written to the bucket: {first_line(exc)}",
            "check weights.bucket and the credentials on the head",
        ) from exc


def prune_bucket(bucket: ObjectStore, keep: int) -> list[int]:
    """Delete all but the newest `keep` versions, and files that none of these has; return those deleted.

    Must not run beside `upload`: files of a version that is not complete yet would go. Raises `RuntimeFault`.
    """
    try:
        found = obstore.list_with_delimiter(bucket)["common_prefixes"]
        numbers = [manifests.parse_version_name(prefix.strip("/").rpartition("/")[2]) for prefix in found]
        versions = sorted(n for n in numbers if n is not None)
        old, kept = versions[:-keep], versions[-keep:]
        for number in old:  # its manifest first, so that no pull begins any more
            for path in _list(bucket, manifests.version_name(number)):
                obstore.delete(bucket, path)
        if old:
            used = {_path(file) for number in kept for file in _read_manifest(bucket, number).all_files}
            for path in set(_list(bucket, _FILES)) - used:
                obstore.delete(bucket, path)
    except (exceptions.BaseError, OSError, ProtocolError) as exc:
        raise RuntimeFault(
            f"old versions cannot be deleted from the bucket: {first_line(exc)}",
            "check the permissions of the head's credentials",
        ) from exc
    return old


def _list(bucket: ObjectStore, prefix: str) -> list[str]:
    return [entry["path"] for batch in obstore.list(bucket, prefix) for entry in batch]


def _read_manifest(bucket: ObjectStore, version: int) -> Manifest:
    return manifests.decode_manifest(bytes(obstore.get(bucket, _manifest_path(version)).bytes()))


def _has(bucket: ObjectStore, file: File) -> bool:
    """Return True if the file is there: uploads are visible once complete, and named by their content."""
    try:
        return obstore.head(bucket, _path(file))["size"] == file.size
    except (exceptions.NotFoundError, FileNotFoundError):
        return False


def _put(bucket: ObjectStore, path: str, source: Path) -> int:
    size = source.stat().st_size
    part_bytes = max(LEAST_PART_BYTES, size // MOST_PARTS + 1)
    obstore.put(bucket, path, source, chunk_size=part_bytes, max_concurrency=UPLOADS)
    return size


def _path(file: File) -> str:
    return f"{_FILES}/{manifests.content_digest((file,))}"


def _manifest_path(version: int) -> str:
    return f"{manifests.version_name(version)}/{MANIFEST}"


class BucketSource:
    """One version in a bucket."""

    def __init__(self, url: str, version: int, idle_s: float) -> None:
        self.left_bytes: int | None = None
        self.bucket = open_bucket(url, idle_s)
        self.manifest_path = _manifest_path(version)
        self.paths: dict[str, str] = {}
        """Of the version's files, once a stream has read the manifest."""

    def stream(self) -> BucketStream:
        """Return a stream; they share the library's connections."""
        return BucketStream(self)


class BucketStream:
    """Reads one range after the other, each within the library's timeout, or until `abort`."""

    step_bytes = manifests.MAX_CHUNK_BYTES
    """A step is a request: a chunk takes one."""

    def __init__(self, source: BucketSource) -> None:
        self._source = source
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._aborted = False

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file of at most `max_bytes`."""
        with _explaining(name):
            return self._await(self._read(name, max_bytes))

    @contextmanager
    def open_range(self, name: str, start: int, end: int, size: int) -> Iterator[Fill]:
        """Yield what reads bytes [start, end) from the front; the size is known by the digests alone."""
        at = start

        def fill(view: memoryview) -> None:
            nonlocal at
            data = memoryview(self._await(self._read_range(name, at, len(view))))
            if len(data) != len(view):
                raise Damaged(f"{name}: {len(data)} bytes at {at}, expected {len(view)}")
            view[:] = data
            at += len(view)

        with _explaining(name):
            yield fill

    def abort(self) -> None:
        """Make a thread that waits on this stream fail now. The only method for other threads."""
        self._aborted = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with suppress(RuntimeError):  # closed meanwhile
                loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Close; idempotent. Connections are shared."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    async def _read(self, name: str, max_bytes: int) -> bytes:
        path = self._source.manifest_path if name == MANIFEST else await self._find(name)
        found = await obstore.get_async(self._source.bucket, path)
        if found.meta["size"] > max_bytes:
            raise ProtocolError(f"{name} is larger than {max_bytes} bytes", "publish the version again")
        return bytes(await found.bytes_async())

    async def _read_range(self, name: str, start: int, length: int) -> Bytes:
        path = await self._find(name)
        return await obstore.get_range_async(self._source.bucket, path, start=start, length=length)

    async def _find(self, name: str) -> str:
        """Return where a file of the version lies."""
        source = self._source
        if not source.paths:
            manifest = manifests.decode_manifest(await self._read(MANIFEST, MAX_MANIFEST_BYTES))
            source.paths = {file.name: _path(file) for file in manifest.all_files}
        if name not in source.paths:
            raise Damaged(f"the bucket's version has no {name}")
        return source.paths[name]

    def _await(self, read: Coroutine[Any, Any, T]) -> T:
        """Return the result; run as a task, so that a hanging bucket can be abandoned at once."""
        self._loop = self._loop or asyncio.new_event_loop()

        async def run() -> T:
            self._task = asyncio.current_task()
            if self._aborted:
                read.close()
                raise Unusable("it is not needed any more")
            return await read

        try:
            return self._loop.run_until_complete(run())
        except asyncio.CancelledError as exc:
            raise Unusable("it is not needed any more") from exc


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as exc:
        raise Absent(f"the bucket does not have {name}, or no longer", "pull it from the head") from exc
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as exc:
        raise ProtocolError(
            f"the bucket refuses to hand out {name}", "give this machine's role read access to weights.bucket"
        ) from exc
    except (exceptions.BaseError, OSError) as exc:
        raise Unusable(f"{name}: {first_line(exc)}") from exc
