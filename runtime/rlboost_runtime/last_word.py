"""Saying how a run ended even where its disk is full.

A run keeps a reserve, a file of a megabyte that nobody reads. Where the outcome cannot be written the reserve
is given up first: there is room then for the outcome and for closing the books, so that the run has ended
for everybody who looks, and can be resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from rlboost_runtime.errors import DISK_ERRNOS
from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder, write_json

log = logging.getLogger(__name__)

_RESERVE_BYTES = 1 << 20
"""The outcome takes less than 4 KiB; SQLite writes whole pages, some of them twice, to close the books."""


def reserve(run: RunFolder) -> None:
    """Take the reserve, unless it is there; a disk that is full already has none to give."""
    path = _reserve(run)
    if path.exists():
        return
    try:
        path.write_bytes(os.urandom(_RESERVE_BYTES))  # zeros might be stored as nothing
    except OSError as problem:
        path.unlink(missing_ok=True)  # a part of it would only take room
        event(log, "reserve.not_taken", level=logging.WARNING, problem=str(problem))


def give_up_reserve(run: RunFolder) -> None:
    """Make room for last words; idempotent, never raises."""
    with contextlib.suppress(OSError):
        _reserve(run).unlink(missing_ok=True)


def write_outcome(run: RunFolder, outcome: Mapping[str, object]) -> bool:
    """Write how the run ended, giving up the reserve where it must; return whether that could be done."""
    try:
        write_json(run.outcome, dict(outcome))
    except OSError as problem:
        if problem.errno not in DISK_ERRNOS:
            raise
    else:
        return True
    give_up_reserve(run)
    try:
        write_json(run.outcome, dict(outcome))
    except OSError as problem:
        event(log, "outcome.not_written", level=logging.ERROR, problem=str(problem))
        return False
    return True


def _reserve(run: RunFolder) -> Path:
    return run.processes / ".reserve"
