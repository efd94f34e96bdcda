"""A bucket (s3://, gs://, az://, or file:// on this machine) as a holder of versions, and as a relay.

::

    URL/v000012/FILE            as in the store; `manifest.json` is written last

The head relays each version once; receivers of any cloud read ranges. Whoever can write to the bucket could
change what lies there, so nothing from it counts before its digest is that of the manifest, and the manifest
not before its content digest is the head's (`weights.pull`). Credentials are those that the machine has: the
SDKs' usual environment variables, files and instance roles.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import from_url

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import MANIFEST
from rlboost_runtime.weights.range_client import Absent, Damaged, Fill, Unusable

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

RETRIES = 2
"""Of one request, by the library; a pull tries again anyway."""
UPLOAD_TIMEOUT_S = 600.0
"""Longest time that one part of an upload may take, retries included."""
LEAST_PART_BYTES = 8 * 1024 * 1024
MOST_PARTS = 9000
"""Of one upload; S3 takes 10,000."""
UPLOADS = 4
"""Parts in memory at once."""


def open_bucket(url: str, timeout_s: float) -> ObjectStore:
    """Return the bucket; nothing is sent yet. Raises `ProtocolError` on a URL that makes no sense."""
    seconds = datetime.timedelta(seconds=timeout_s)
    options: Any = {"timeout": seconds, "connect_timeout": seconds, "allow_http": True}
    retries: Any = {"max_retries": RETRIES, "retry_timeout": seconds}
    try:
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        return from_url(url, client_options=options, retry_config=retries)
    except (exceptions.BaseError, ValueError) as exc:
        raise ProtocolError(
            f"weights.bucket {url!r} cannot be used: {first_line(exc)}",
            "give a URL such as s3://BUCKET/PREFIX",
        ) from exc


def relay(bucket: ObjectStore, folder: Path, *, full: bool = True) -> int:
    """Upload the version in `folder`, held by the caller; return the bytes sent.

    Without `full` only its deltas and small files: for receivers that follow from version to version. What is
    there already is written again. Raises `RuntimeFault`.
    """
    manifest = manifests.read_manifest(folder)
    targets = {delta.target for delta in manifest.deltas}
    names = [file.name for file in manifest.all_files if full or file.name not in targets]
    sent = 0
    prefix = manifests.version_name(manifest.version)
    try:
        for name in [*names, MANIFEST]:
            size = (folder / name).stat().st_size
            part_bytes = max(LEAST_PART_BYTES, size // MOST_PARTS + 1)
            obstore.put(
                bucket, f"{prefix}/{name}", folder / name, chunk_size=part_bytes, max_concurrency=UPLOADS
            )
            sent += size
    except (exceptions.BaseError, OSError) as exc:
        raise RuntimeFault(
            f"version {manifest.version} cannot be written to the bucket: {first_line(exc)}",
            "check weights.bucket and the credentials on the head",
        ) from exc
    return sent


def forget(bucket: ObjectStore, keep: int) -> list[int]:
    """Delete all but the newest `keep` versions; return those deleted. Raises `RuntimeFault`."""
    try:
        found = obstore.list_with_delimiter(bucket)["common_prefixes"]
        numbers = [manifests.parse_version_name(prefix.strip("/").rpartition("/")[2]) for prefix in found]
        old = sorted(n for n in numbers if n is not None)[:-keep]
        for number in old:
            prefix = manifests.version_name(number)
            paths = [entry["path"] for batch in obstore.list(bucket, prefix) for entry in batch]
            paths.sort(key=lambda path: not path.endswith(MANIFEST))  # first of all: nobody begins any more
            for path in paths:
                obstore.delete(bucket, path)
    except exceptions.BaseError as exc:
        raise RuntimeFault(
            f"old versions cannot be deleted from the bucket: {first_line(exc)}",
            "check the permissions of the head's credentials",
        ) from exc
    return old


class BucketSource:
    """One version in a bucket."""

    def __init__(self, url: str, version: int, idle_s: float) -> None:
        self.left_bytes: int | None = None
        self._bucket = open_bucket(url, idle_s)
        self._prefix = manifests.version_name(version)

    def stream(self) -> BucketStream:
        """Return a stream; they share the library's connections."""
        return BucketStream(self._bucket, self._prefix)


class BucketStream:
    """Reads one range after the other, each within the library's timeout, or until `abort`."""

    def __init__(self, bucket: ObjectStore, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._aborted = False

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file of at most `max_bytes`."""
        with _explaining(name):
            found = obstore.get(self._bucket, f"{self._prefix}/{name}")
            if found.meta["size"] > max_bytes:
                raise ProtocolError(f"{name} is larger than {max_bytes} bytes", "publish the version again")
            return bytes(found.bytes())

    @contextmanager
    def open_range(self, name: str, start: int, end: int, size: int) -> Iterator[Fill]:
        """Yield what reads bytes [start, end) from the front; the size is known by the digests alone."""
        path = f"{self._prefix}/{name}"
        at = start

        def fill(view: memoryview) -> None:
            nonlocal at
            data = memoryview(self._get_range(path, at, len(view)))
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

    def _get_range(self, path: str, start: int, length: int) -> Bytes:
        """Return a range; a coroutine, so that a hanging bucket can be left at once."""
        self._loop = self._loop or asyncio.new_event_loop()

        async def get() -> Bytes:
            self._task = asyncio.current_task()
            if self._aborted:
                raise Unusable("nobody needs it any more")
            return await obstore.get_range_async(self._bucket, path, start=start, length=length)

        try:
            return self._loop.run_until_complete(get())
        except asyncio.CancelledError as exc:
            raise Unusable("nobody needs it any more") from exc


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as exc:
        raise Absent(f"the bucket does not have {name}, or not any more", "pull it from the head") from exc
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as exc:
        raise ProtocolError(
            f"the bucket refuses to hand out {name}", "give this machine's role read access to weights.bucket"
        ) from exc
    except (exceptions.BaseError, OSError) as exc:
        raise Unusable(f"{name}: {first_line(exc)}") from exc


def first_line(exc: Exception) -> str:
    """Return what went wrong, without the library's details."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]
