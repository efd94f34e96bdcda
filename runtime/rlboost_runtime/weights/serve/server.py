"""The weight server: hands out the run's weight versions over TLS, from a process of its own.

::

    python -m rlboost_runtime.weights.serve.server RUN_FOLDER

Requests and responses: see `weights.serve.http`. Guarantees: only files that a version's manifest names are
reachable; a version that is being pulled is not deleted, nor within `LINGER_S` of its last request; the port
stays the same over restarts, so that machines find the server again.

A thread uploads new versions to the job's bucket. Guarantees: a version is held while it is uploaded; what
cannot be written is tried again later, and never delays pulls from the head; old versions are deleted from
the bucket.

Exit codes: 0 after SIGTERM or SIGINT, 1 if the port of the last start is taken, 2 on wrong arguments.
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rlboost_runtime.deploy.wheelhouse import wheel_files
from rlboost_runtime.errors import ProtocolError, RLBoostError, RuntimeFault, port_taken
from rlboost_runtime.logs import event, explain, setup
from rlboost_runtime.run import security
from rlboost_runtime.run.bucket import open_bucket
from rlboost_runtime.run.credentials import Readers
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import endpoint, listen_host, read_address
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.weights.pull.bucket import UPLOAD_TIMEOUT_S, prune_bucket, upload
from rlboost_runtime.weights.serve.catalog import StoreCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer
from rlboost_runtime.weights.store.store import VersionGone, WeightStore

log = logging.getLogger(__name__)

DRAIN_S = 2.0
"""An upload under way gets this long at the end; its version is not needed any more."""
LINGER_S = 15.0
"""How long a version stays held after a request: longer than a puller's pause between two range requests
(its longest backoff is 2 s), short against a step, so that old versions do not pile up."""


def serve(run: RunFolder, stop: threading.Event, linger_s: float = LINGER_S) -> None:
    """Serve the run's versions until `stop` is set. Raises `PortTaken`."""
    listener = bind(run)
    catalog = StoreCatalog(WeightStore(run.weights), linger_s)
    access = Readers(run).status_for
    server = WeightHttpServer(listener, security.server_context(run), access, catalog, wheel_files())
    port = listener.getsockname()[1]
    write_json(run.weights_endpoint, endpoint(port, read_address(run)))
    event(log, "weights.server_started", port=port)
    with _uploading(run, catalog.store, stop):
        server.serve_until(stop)


@contextmanager
def _uploading(run: RunFolder, store: WeightStore, stop: threading.Event) -> Iterator[None]:
    """Upload versions within this context, if the job has a bucket."""
    url = read_resolved(run.job_json).weights.bucket if run.job_json.exists() else None
    if url is None:
        yield
        return

    thread = threading.Thread(
        target=BucketUpload(store, run.place_in(url)).run, args=(stop,), name="upload", daemon=True
    )
    thread.start()
    yield
    stop.set()
    thread.join(DRAIN_S)


def bind(run: RunFolder) -> socket.socket:
    """Return a socket on the port named in the endpoint file, on a free one if there is no file yet.

    It is on loopback, or where other machines reach the head (`run.head`).
    """
    known, address = read_json(run.weights_endpoint), read_address(run)
    fresh = 0 if address is None else address.bytes_port
    port = fresh if known is None else urlsplit(known["url"]).port or 0
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen_host(address), port))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        if exc.errno != errno.EADDRINUSE:
            raise
        raise port_taken(port, "weight server", run.name) from exc
    return listener


def main(arguments: list[str]) -> int:
    """Run the server; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_runtime.weights.serve.server RUN_FOLDER", file=sys.stderr)
        return 2
    setup("weights")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run = RunFolder(Path(arguments[0]).absolute())
        problems = WeightStore(run.weights).put_damaged_aside()
        if problems and _has_old_trainer(run):
            explain(log, RuntimeFault(problems[-1], f"{_REPUBLISH} rlboost launch {run.name} --resume"))
            return EX_CONFIG
        serve(run, stop)
    except RLBoostError as exc:
        explain(log, exc)
        return exc.exit_code
    return 0


EX_CONFIG = 78
"""Another server would not help: only a trainer that starts publishes a version again."""
_REPUBLISH = "the trainer publishes these weights again when it starts: type"
_STARTS_WITH_US_S = 30.0


def _has_old_trainer(run: RunFolder) -> bool:
    """Return True if the trainer lives and began well before us: it looked at its versions long ago."""
    noted = read_json(run.processes / "trainer.json")
    return noted is not None and noted["started_at"] < time.time() - _STARTS_WITH_US_S


POLL_S = 0.5
RETRY_S = 10.0
KEEP = 2


class BucketUpload:
    """Uploads each new version of `store` to the bucket at `url`. Raises `ProtocolError` on a wrong URL."""

    def __init__(self, store: WeightStore, url: str) -> None:
        self._store = store
        self._bucket = open_bucket(url, UPLOAD_TIMEOUT_S)
        self._done: int | None = None

    def run(self, stop: threading.Event) -> None:
        """Upload until `stop` is set."""
        pause_s = POLL_S
        while not stop.wait(pause_s):
            pause_s = POLL_S
            try:
                self.upload_newest()
            except (RuntimeFault, OSError) as exc:
                event(log, "bucket.failed", level=logging.WARNING, problem=str(exc))
                pause_s = RETRY_S

    def upload_newest(self) -> int | None:
        """Upload the newest version unless that is done; return its number if so. Raises `RuntimeFault`."""
        version = self._store.latest()
        if version is None or version == self._done:
            return None
        try:
            with self._store.read(version) as hold:
                sent = upload(self._bucket, hold.folder)
        except (VersionGone, ProtocolError) as exc:
            event(log, "bucket.skipped", level=logging.WARNING, version=version, problem=str(exc))
            return None
        self._done = version
        event(log, "bucket.written", version=version, num_bytes=sent)
        prune_bucket(self._bucket, KEEP)
        return version


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
