"""Keeps a bucket up to date with the head's store, on a thread of its own.

Guarantees: a version is held while it is uploaded; what cannot be written is tried again with the next look,
and never keeps anybody from pulling from the head; old versions are deleted from the bucket.
"""

from __future__ import annotations

import logging
import threading

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.weights.bucket import UPLOAD_TIMEOUT_S, forget, open_bucket, relay
from rlboost_runtime.weights.store import VersionGone, WeightStore

log = logging.getLogger(__name__)

LOOK_S = 0.5
RETRY_S = 10.0
KEEP = 2


class Relay:
    """Uploads each new version of `store` to the bucket at `url`. Raises `ProtocolError` on a wrong URL."""

    def __init__(self, store: WeightStore, url: str) -> None:
        self._store = store
        self._bucket = open_bucket(url, UPLOAD_TIMEOUT_S)
        self._done: int | None = None

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set."""
        pause_s = LOOK_S
        while not stop.wait(pause_s):
            pause_s = LOOK_S
            try:
                self.look()
            except (RuntimeFault, OSError) as exc:
                event(log, "bucket.failed", level=logging.WARNING, problem=str(exc))
                pause_s = RETRY_S

    def look(self) -> int | None:
        """Upload the newest version unless that is done; return it if so. Raises `RuntimeFault`."""
        version = self._store.latest()
        if version is None or version == self._done:
            return None
        try:
            with self._store.read(version) as lease:
                sent = relay(self._bucket, lease.folder)
        except (VersionGone, ProtocolError) as exc:
            event(log, "bucket.skipped", level=logging.WARNING, version=version, problem=str(exc))
            return None
        self._done = version
        event(log, "bucket.written", version=version, num_bytes=sent)
        forget(self._bucket, KEEP)
        return version
