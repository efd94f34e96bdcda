"""Copies the head of a run to the job's `output`, round after round, in a process of its own.

Guarantees:

- what a state names is there, and is a head that lost its unsynced tail, as after a power cut: the journal
  and the ledger have at least what the event log relies on, and the event log has at least what the newest
  checkpoint that the state names relies on;
- in a round that succeeds, a state is `EVERY_S` old and as much older as the round took when the next one
  replaces it; a round sends at most about `ROUND_BYTES`, and says what it could not send yet;
- nobody waits for it: it only reads, in pieces, and a bucket that refuses is tried again in the next round;
- a head that finds a newer one raises `HeadReplaced`.

The order of a round makes the first of these true: note which checkpoints are complete, note how long the
event log is, copy the journals to their ends, then the ledger, then the event log up to where it was, then
the rest, then write the state.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import obstore

from rlboost_providers.base.tags import owner_of
from rlboost_runtime.backup.fence import (
    HeadReplaced,
    claim,
    newest_head,
    own_number,
    require_newest,
)
from rlboost_runtime.backup.growing import GrowingFile
from rlboost_runtime.backup.layout import (
    FAILURES,
    MISSING,
    PART_BYTES,
    GrownCopy,
    HeadState,
    part_key,
    read_state,
    state_key,
    this_version,
)
from rlboost_runtime.backup.note import BackupNote, write_note
from rlboost_runtime.backup.small import LEDGER, SNAPSHOT, SmallFiles, small_files, version_manifests
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.logs import event
from rlboost_runtime.run.bucket import COMPLETE, first_line, open_output
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.run.folder import RunFolder, home, read_json

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""From the begin of one round to that of the next."""
SMALL_BYTES_PER_S = 4_000_000
"""What small files may take of the head's upload on average: a large ledger is sent whole, and then the pause
is longer."""
ROUND_BYTES = 64 * 1024 * 1024
"""Most bytes of journals that a round sends, about: a backlog does not keep states from being written."""
REQUEST_S = 30.0
"""Longest time of one request, with the library's own retries."""
LAST_S = 120.0
"""Longest time for the last rounds of an ended run."""
MOST_CHECKPOINTS = 64
"""Checkpoints that a state names."""
_LINES = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")
_EVENTS = "events.log"


class Streamer:
    """The copy of one run. One thread."""

    def __init__(self, run: RunFolder, job: Job, bucket: ObjectStore) -> None:
        """Nothing is sent yet."""
        self._run = run
        self._bucket = bucket
        self._has_own_trainer = job.trainer.script is not None
        self._note = BackupNote(since=time.time())
        self._head: int | None = None
        self._state = HeadState()
        self._grown: dict[str, GrowingFile] = {}
        self._small: SmallFiles | None = None
        self._covered: dict[str, str] = {}
        self._garbage: list[str] = []
        self._has_forgotten = False
        self._small_bytes = 0

    @classmethod
    def for_run(cls, run: RunFolder, job: Job) -> Streamer | None:
        """Return the copy that the job asks for; None: nothing. Raises `ProtocolError`."""
        return None if job.output is None else cls(run, job, open_output(run, job.output, REQUEST_S))

    @property
    def pause_s(self) -> float:
        """Seconds from the begin of the last round to that of the next."""
        return max(EVERY_S, self._small_bytes / SMALL_BYTES_PER_S)

    def attempt(self) -> bool:
        """Copy a round; return True if there is more to copy at once. What fails is said, in `backup.json`
        too, and tried again by the next call. Raises `HeadReplaced`."""
        try:
            has_more = self.round()
            problem = ""
        except HeadReplaced:
            raise
        except RLBoostError as error:
            has_more, problem = False, error.problem
        except Exception as error:  # noqa: BLE001 - no mistake here may end the run
            has_more, problem = False, first_line(error)
            if not isinstance(error, FAILURES):
                event(log, "backup.broken", level=logging.ERROR, exc_info=True)
        if problem and problem != self._note.problem:
            event(log, "backup.failed", level=logging.WARNING, problem=problem)
        elif self._note.problem and not problem:
            event(log, "backup.works_again")
        self._note.problem = problem
        self._write_note()
        return has_more

    def round(self) -> bool:
        """Copy what is new and write a state; return True if a journal has more than the round could send.

        Raises `HeadReplaced`, and what the bucket and the disk do.
        """
        head = self._head = self._head or self._begin()
        require_newest(self._bucket, self._run, head)
        assert self._small is not None
        number, now = self._state.round + 1, time.time()
        ended = str((read_json(self._run.outcome) or {}).get("state", ""))
        self._small_bytes = 0
        checkpoints = self._complete_checkpoints()
        self._copy_small(SNAPSHOT, number)
        events = self._file(_EVENTS).size()
        lines = {name: self._file(name).size() for name in _LINES}
        if not self._copy_journals():
            if self._state.at:  # else there is nothing yet that a head could begin with
                journals = {name: copy for name, copy in self._copies().items() if _is_journal(name)}
                grown = {name: copy for name, copy in self._state.grown.items() if not _is_journal(name)}
                self._write_state(msgspec.structs.replace(self._state, round=number, grown=grown | journals))
            return True
        names = [*small_files(self._run)]
        for name in [LEDGER, *names]:
            self._copy_small(name, number)
        self._advance(self._file(_EVENTS), events)
        for name, size in lines.items():
            self._advance(self._file(name), size)
        manifests = [*version_manifests(self._run)]
        for name in manifests:
            self._copy_small(name, number)
        self._small.forget({LEDGER, SNAPSHOT, *names, *manifests})
        checkpoints = self._covered = _newest({**self._state.checkpoints, **checkpoints})
        gone = self._drop_journals()
        state = HeadState(
            version=this_version(), run=self._run.name, head=head, owner=owner_of(home()), at=now,
            round=number, grown=self._copies(), whole=dict(self._small.copies), checkpoints=checkpoints,
            ended=ended,
        )  # fmt: skip
        self._write_state(state)
        self._delete([*self._small.replaced, *gone])
        self._small.replaced.clear()
        self._forget_former_heads(head)
        return False

    def close(self) -> None:
        """Close the files."""
        for file in self._grown.values():
            file.close()

    # --- beginning ----------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """Return this head's number; go on from the state that it wrote before."""
        head = own_number(self._run)
        if head is None:
            head = newest_head(self._bucket) + 1
            self._require_ended(head - 1)
            claim(self._bucket, self._run, head)
        known = read_state(self._bucket, head)
        if known is not None:
            self._state = msgspec.json.decode(known, type=HeadState)
        self._small = SmallFiles(self._run, head, self._state.whole)
        for name, copy in self._state.grown.items():
            self._grown[name] = GrowingFile(self._run.path / name, name, head, copy)
        event(log, "backup.began", head=head, round=self._state.round)
        return head

    def _require_ended(self, head: int) -> None:
        """Raise `RuntimeFault` where an open run of this name, which is not this one, was copied there."""
        data = read_state(self._bucket, head) if head else None
        state = HeadState(ended="none") if data is None else msgspec.json.decode(data, type=HeadState)
        if not state.ended:
            raise RuntimeFault(
                f"the copy of another head of a run {self._run.name} is at the output, and that run has not"
                " ended",
                "resume it (rlboost launch --resume OUTPUT/RUN), or delete OUTPUT/RUN/head, or give this job"
                " another name",
            )

    # --- a round ------------------------------------------------------------------------------------------

    def _file(self, name: str) -> GrowingFile:
        if name not in self._grown:
            assert self._head is not None
            self._grown[name] = GrowingFile(self._run.path / name, name, self._head)
        return self._grown[name]

    def _copies(self) -> dict[str, GrownCopy]:
        return {name: file.copy for name, file in self._grown.items() if file.copy.size}

    def _complete_checkpoints(self) -> dict[str, str]:
        """Return the SHA-256 of the digests of each complete checkpoint."""
        found = {}
        for step in saved_steps(self._run.checkpoints):
            folder = step_folder(self._run.checkpoints, step)
            try:
                found[folder.name] = hashlib.sha256((folder / "digests.json").read_bytes()).hexdigest()
            except FileNotFoundError:  # deleted meanwhile
                continue
        return found

    def _copy_journals(self) -> bool:
        """Copy the journals to their ends, oldest segment first; return False if that was too much."""
        paths = [*self._run.journal.glob("step-*.seg"), *self._run.requests.glob("*.seg")]
        for path in sorted(paths):
            self._file(path.relative_to(self._run.path).as_posix())
        budget = ROUND_BYTES
        for name in sorted(self._grown):
            if _is_journal(name):
                file = self._grown[name]
                budget -= self._advance(file, file.size(), budget)
                if budget <= 0 and file.lag_bytes:
                    return False
        return budget > 0

    def _advance(self, file: GrowingFile, limit: int, budget: int = sys.maxsize) -> int:
        before = file.copy
        sent = file.advance(self._bucket, limit, budget)
        self._note.requests += -(-sent // PART_BYTES)
        if file.copy.life != before.life:
            self._garbage += _parts(self._head or 0, file.name, before)
        return sent

    def _copy_small(self, name: str, number: int) -> None:
        assert self._small is not None
        sent = self._small.copy(self._bucket, name, number)
        self._small_bytes += sent
        self._note.requests += bool(sent)

    def _drop_journals(self) -> list[str]:
        """Forget the segments that were deleted here, once a checkpoint that is whole there makes up for
        them; return their objects."""
        gone = [name for name, file in self._grown.items() if _is_journal(name) and file.is_gone]
        if not gone:
            return []
        newest = self._newest_there() if any(name.startswith("journal/") for name in gone) else -1
        keys = []
        for name in gone:
            step = int(Path(name).stem.rpartition("-")[2]) if name.startswith("journal/") else -1
            if step <= newest or self._has_own_trainer:
                file = self._grown.pop(name)
                file.close()
                keys += _parts(self._head or 0, name, file.copy)
        return keys

    def _newest_there(self) -> int:
        """Return the step of the newest covered checkpoint that is whole there; -1: none."""
        for name in reversed(self._covered):
            try:
                obstore.head(self._bucket, f"checkpoints/{name}/{COMPLETE}")
            except MISSING:
                continue
            return int(name.rpartition("-")[2])
        return -1

    def _write_state(self, state: HeadState) -> None:
        obstore.put(self._bucket, state_key(self._head or 0), msgspec.json.encode(state), use_multipart=False)
        self._state = state
        self._note.requests += 1
        self._note.at = state.at or self._note.at
        self._note.stored_bytes = state.num_bytes
        garbage, self._garbage = self._garbage, []
        self._delete(garbage)

    def _delete(self, keys: list[str]) -> None:
        """Delete what no state names; what cannot be deleted only takes room."""
        for key in keys:
            try:
                obstore.delete(self._bucket, key)
            except FAILURES as problem:
                if not isinstance(problem, MISSING):
                    event(log, "backup.not_deleted", key=key, problem=first_line(problem))

    def _forget_former_heads(self, head: int) -> None:
        """Once this head has a state of its own, delete those of the heads that it goes on from."""
        if self._has_forgotten or not self._run.restored.exists():
            return
        for former in range(1, head):
            prefix = state_key(former).rpartition("/")[0]
            keys = [entry["path"] for batch in obstore.list(self._bucket, prefix) for entry in batch]
            self._delete(sorted(keys, key=lambda key: key != state_key(former)))
        self._has_forgotten = True

    def _write_note(self) -> None:
        self._note.lag_bytes = sum(file.lag_bytes for file in self._grown.values())
        try:
            write_note(self._run, self._note)
        except OSError as problem:
            event(log, "backup.not_noted", level=logging.WARNING, problem=str(problem))


def last_round(run: RunFolder, job: Job, within_s: float = LAST_S) -> bool:
    """Copy what an ended run leaves, with how it ended; return False if another machine is its head now: then
    nothing of this one may go to the output any more. What fails is logged."""
    until = time.monotonic() + within_s
    try:
        streamer = Streamer.for_run(run, job)
        while streamer is not None and streamer.attempt() and time.monotonic() < until:
            pass
    except HeadReplaced as problem:
        event(log, "backup.replaced", level=logging.WARNING, problem=problem.problem)
        return False
    except (*FAILURES, RLBoostError) as problem:
        event(log, "backup.not_finished", level=logging.WARNING, problem=str(problem))
    return True


def _newest(checkpoints: dict[str, str]) -> dict[str, str]:
    """Return the newest checkpoints, the newest last: those there may be older than those here."""
    names = sorted(checkpoints, key=lambda name: (len(name), name))
    return {name: checkpoints[name] for name in names[-MOST_CHECKPOINTS:]}


def _is_journal(name: str) -> bool:
    return name.startswith(("journal/", "requests/"))


def _parts(head: int, name: str, copy: GrownCopy) -> list[str]:
    """Return the objects of a copy."""
    return [part_key(head, name, copy.life, part) for part in range(-(-copy.size // PART_BYTES))]
