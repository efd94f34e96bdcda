"""Mutated journal segments, event logs and snapshots of a run against their readers.

What holds for each file: the reader ends, raises nothing that recovery does not expect, and what it returns
is a prefix of what was written. Besides, records whose checksum is right and whose content is not: restoring
them raises nothing but `ProtocolError`.
"""

from __future__ import annotations

import faulthandler
import logging
from collections import Counter
from pathlib import Path
from random import Random

import msgspec

from benchmarks.fuzz.mutations import mutated, respelled
from rlboost_runtime.coordinator.driver.core_driver import TOKENS, OpenStep, StepHeader
from rlboost_runtime.coordinator.driver.totals import recover, snapshot_code
from rlboost_runtime.coordinator.storage.journal import EventReader, SegmentReader, segment_path
from rlboost_runtime.coordinator.storage.snapshot import SnapshotWriter, UnfitSnapshot, read_snapshot
from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.seams import SystemClock

RECORDS, EVENTS = 60, 300
"""Of the run: what each file holds."""
RECORDS_EVERY = 10
"""Files between two stores that mutated records are restored into: it has as many responses as the run."""
HANG_S = 20.0


class Files:
    """The beginnings of a run's files, and mutated copies of them in `folder`."""

    def __init__(self, run: RunFolder, folder: Path, seed: int) -> None:
        folder.mkdir()
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self._path = folder / "mutated"
        self._log = folder / "events.log"
        reader = SegmentReader(segment_path(run.journal, 0))
        self._records = [record for _, record in zip(range(RECORDS), reader, strict=False)]
        self._tokens = [record[1:] for record in self._records if record.startswith(TOKENS)]
        header = msgspec.msgpack.decode(self._records[0][1:], type=StepHeader)
        step = OpenStep(header.request, header.first_response)
        self._step = (header.request.step, step.all_responses(), step.limits(), header.request.stop_token_ids)
        self._segment = segment_path(run.journal, 0).read_bytes()[: reader.good_bytes]
        events = EventReader(run.events)
        self._events = [event for _, event in zip(range(EVENTS), events, strict=False)]
        self._log.write_bytes(run.events.read_bytes()[: events.good_bytes])
        known = recover(self._log)
        writer = SnapshotWriter(folder / "events.snapshot", snapshot_code(), SystemClock(), 0)
        writer.write((known.core, known.totals), known.log.place)
        writer.join()
        self._snapshot = (folder / "events.snapshot").read_bytes()

    def run(self, number: int) -> None:
        """Read so many mutated files, and ten times as many mutated records."""
        tests = (self._of_segment, self._of_log, self._of_snapshot)
        for index in range(number):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            tests[index % len(tests)]()
            if index % RECORDS_EVERY == 0:
                self._of_records(10 * min(RECORDS_EVERY, number - index))
            self.counts["files"] += 1
        faulthandler.cancel_dump_traceback_later()

    def _of_segment(self) -> None:
        self._path.write_bytes(mutated(self._segment, self.random))
        found = SegmentReader(self._path)
        records = list(found)
        assert records == self._records[: len(records)], "a mutated record was read as whole"
        self.counts["cut"] += bool(found.problem)

    def _of_log(self) -> None:
        self._path.write_bytes(mutated(self._log.read_bytes(), self.random))
        found = recover(self._path)
        num_read = found.totals.num_events
        assert list(EventReader(self._path)) == self._events[:num_read], "a mutated event was read as whole"
        self.counts["cut"] += bool(found.log.problem)

    def _of_snapshot(self) -> None:
        data = mutated(self._snapshot, self.random)
        self._path.write_bytes(data)
        try:
            read_snapshot(self._path, snapshot_code(), self._log)
        except UnfitSnapshot:
            self.counts["ignored"] += 1
        else:
            assert data == self._snapshot, "a mutated snapshot was used"

    def _of_records(self, number: int) -> None:
        """A right checksum, a wrong content: as a bug or a bad memory may write it."""
        store = TokenStore()
        store.open_step(*self._step)
        for _ in range(number):
            record = self.random.choice(self._tokens)
            change = mutated if self.random.random() < 0.5 else respelled
            try:
                store.restore(change(record, self.random))
            except ProtocolError:
                self.counts["records_refused"] += 1
            self.counts["records"] += 1


def quiet() -> None:
    """Keep the log of so many refusals from the terminal."""
    logging.disable(logging.CRITICAL)
