"""Snapshots of the core beside the event log, so that a restart replays only the events after the last one.

Guarantees: a snapshot never changes what a restart finds, only how long it takes. It is used only if it
is whole (BLAKE2b), was made by the same code (`code_digest`) and from the same event log (length and crc32 of
all that is before its place); else the whole log is replayed. The log is never shortened. Nothing waits for
a write, and one that fails only makes the next restart longer.

A snapshot is a pickle of the core and the totals as they are, so that new state needs no code here. It is
read from the run's own folder only, whose owner's code runs anyway.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import msgspec

import rlboost_runtime.core
from rlboost_runtime.coordinator.storage.journal import LogPlace
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.run.folder import write_atomically
from rlboost_runtime.seams import Clock

log = logging.getLogger(__name__)

EVERY_EVENTS = 10_000
"""Events between two snapshots: at most a second or two of replay, even with a thousand responses."""
LATEST_EVENTS = 100_000
"""The same where snapshots take long, if no step ends before: nobody waits for an assignment then."""
QUICK_S = 0.05
"""A snapshot that takes longer holds assignments up: some 25 us for each response of the step."""
PAUSE_SHARE = 200
"""Times what the last snapshot took passes before the next: it holds the event loop up for 0.5 % at most."""
_BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16


class UnfitSnapshot(ValueError):
    """The snapshot may not be used; says why."""


class _Snapshot(msgspec.Struct, frozen=True):
    code: str
    place: LogPlace
    state: bytes


def code_digest(*modules: str) -> str:
    """Return what names the code that a snapshot's state belongs to: the core's sources, those of the files
    `modules`, and Python."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=_DIGEST_BYTES)
    core = Path(rlboost_runtime.core.__path__[0])
    for path in [*sorted(core.rglob("*.py")), *map(Path, modules)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_snapshot(path: Path, code: str, events: Path) -> tuple[Any, LogPlace]:
    """Return the state and its place in the event log. Raises `UnfitSnapshot`, and `FileNotFoundError`."""
    data = path.read_bytes()
    if hashlib.blake2b(data[_DIGEST_BYTES:], digest_size=_DIGEST_BYTES).digest() != data[:_DIGEST_BYTES]:
        raise UnfitSnapshot("it is damaged")
    found = msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=_Snapshot)
    if found.code != code:
        raise UnfitSnapshot("another version of RLBoost wrote it")
    if not events.exists() or events.stat().st_size < found.place.num_bytes:
        raise UnfitSnapshot("the event log is shorter than it was")
    if _crc_of(events, found.place.num_bytes) != found.place.crc:
        raise UnfitSnapshot("the event log is not the one that it was made from")
    return pickle.loads(found.state), found.place  # noqa: S301 - our own file, see above


def _crc_of(path: Path, num_bytes: int) -> int:
    crc = 0
    with path.open("rb") as file:
        while num_bytes and (block := file.read(min(num_bytes, _BLOCK_BYTES))):
            crc = zlib.crc32(block, crc)
            num_bytes -= len(block)
    return crc


class SnapshotWriter:
    """Writes snapshots of one run, each over the one before, in threads."""

    def __init__(self, path: Path, code: str, clock: Clock, num_replayed: int) -> None:
        """`num_replayed`: events after the snapshot that this process began with."""
        self._path = path
        self._code = code
        self._clock = clock
        self._num_since = num_replayed
        self._not_before = clock.now()
        self._took_s = math.inf  # not known yet
        self._thread: threading.Thread | None = None

    def after_event(self, state: Any, place: LogPlace, *, is_quiet: bool) -> None:
        """Write a snapshot of `state`, which the events up to `place` led to, if it is time for one;
        `is_quiet`: a step has just been trained."""
        self._num_since += 1
        wanted = EVERY_EVENTS if is_quiet or self._took_s <= QUICK_S else LATEST_EVENTS
        if self._num_since >= wanted and self._clock.now() >= self._not_before and not self.is_busy:
            self.write(state, place)

    @property
    def is_busy(self) -> bool:
        """True while the last one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, state: Any, place: LogPlace) -> None:
        """Write a snapshot now; `state` may change once this returns."""
        began = self._clock.now()
        pickled = pickle.dumps(state, pickle.HIGHEST_PROTOCOL)
        data = msgspec.msgpack.encode(_Snapshot(self._code, place, pickled))
        self._num_since, self._took_s = 0, self._clock.now() - began
        self._not_before = began + (1 + PAUSE_SHARE) * self._took_s
        self._thread = threading.Thread(target=self._store, args=(data,), name="snapshot")
        self._thread.start()

    def join(self) -> None:
        """Wait until the last one is written."""
        if self._thread is not None:
            self._thread.join()

    def _store(self, data: bytes) -> None:
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        try:
            write_atomically(self._path, digest + data, durably=True)
        except OSError as error:
            log_event(log, "snapshot.failed", problem=str(error))
