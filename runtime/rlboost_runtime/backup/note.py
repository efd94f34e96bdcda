"""How the copying goes, for others on the head: `backup.json`, written in every round."""

from __future__ import annotations

import time

import msgspec

from rlboost_runtime.protocol.status import BackupStatus
from rlboost_runtime.run.folder import RunFolder, read_json, write_json


class BackupNote(msgspec.Struct, kw_only=True):
    """Times in seconds since the Unix epoch."""

    since: float
    """When this process began to copy."""
    at: float | None = None
    """Everything of before is there; None: nothing yet."""
    lag_bytes: int = 0
    requests: int = 0
    """Writes since the run began on this head."""
    stored_bytes: int = 0
    problem: str = ""
    """Why the last round failed."""


def write_note(run: RunFolder, note: BackupNote) -> None:
    """Say how it goes. Raises `OSError`."""
    write_json(run.backup, msgspec.to_builtins(note))


def read_note(run: RunFolder) -> BackupNote | None:
    """Return how it goes; None where nothing is copied."""
    found = read_json(run.backup)
    return None if found is None else msgspec.convert(found, BackupNote)


def backup_status(run: RunFolder, now: float | None = None) -> BackupStatus | None:
    """Return the same as a run's status has it."""
    note = read_note(run)
    if note is None:
        return None
    now = time.time() if now is None else now
    lag_s = max(0.0, now - (note.since if note.at is None else note.at))
    return BackupStatus(
        lag_s=round(lag_s, 1),
        lag_bytes=note.lag_bytes,
        requests=note.requests,
        stored_bytes=note.stored_bytes,
        problem=note.problem,
    )
