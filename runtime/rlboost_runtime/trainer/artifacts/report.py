"""The report of an ended run, copied beside its model to the job's `output`: OUTPUT/RUN/report/FILE.

Outcome, last status, the books in one file that needs no other, what each machine was bought as, logs. A
laptop that was off reads there how a run ended whose head has ended itself. `outcome.json` is written last: a
report that has it is whole. There it also says when the run ended, by the clock of its head: a run that was
resumed leaves the report of its former end until it ends again.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import obstore
from obstore import exceptions

from rlboost_runtime.billing.ledger_file import in_one_file
from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.bucket import first_line, open_output
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically

log = logging.getLogger(__name__)

REQUEST_S = 30.0
"""Longest time of one request, with the library's own retries."""
_FOLDER = "report"
_LEDGER = "ledger.sqlite"
_LAST = "outcome.json"
_ENDED = "ended_ns"
_WHOLE = (
    "status.json",
    "ending.json",
    "cloud/bought.json",
    "metrics.jsonl",
    "samples.jsonl",
    "evaluations.jsonl",
)
_FAILURES = (ProtocolError, exceptions.BaseError, OSError, ValueError, sqlite3.Error)


def put_report(run: RunFolder, output: str) -> bool:
    """Copy the report of the ended run; return True if it is there. Blocks; logs what failed."""
    try:
        bucket = open_output(run, output, REQUEST_S)
        if run.ledger.exists():
            obstore.put(bucket, f"{_FOLDER}/{_LEDGER}", in_one_file(run.ledger))
        for path in _files(run):
            obstore.put(bucket, f"{_FOLDER}/{path.relative_to(run.path).as_posix()}", path)
        outcome = {**(read_json(run.outcome) or {}), _ENDED: run.outcome.stat().st_mtime_ns}
        obstore.put(bucket, f"{_FOLDER}/{_LAST}", json.dumps(outcome).encode())
    except _FAILURES as problem:
        event(log, "report.not_copied", level=logging.WARNING, output=output, problem=first_line(problem))
        return False
    event(log, "report.copied", output=output)
    return True


def take_report(run: RunFolder, output: str, after_ns: int = 0) -> bool:
    """Fetch the report of an end after `after_ns`, by the clock of the run's head, into the run's folder;
    return whether there is one. Raises `RuntimeFault`."""
    try:
        bucket = open_output(run, output, REQUEST_S)
        names = [entry["path"] for batch in obstore.list(bucket, _FOLDER) for entry in batch]
        parts = {name: PurePosixPath(name.partition(f"{_FOLDER}/")[2]) for name in names}
        if PurePosixPath(_LAST) not in parts.values():
            return False
        outcome = json.loads(bytes(obstore.get(bucket, f"{_FOLDER}/{_LAST}").bytes()))
        if after_ns and outcome.get(_ENDED, 0) <= after_ns:
            return False
        for name, part in sorted(parts.items(), key=lambda each: str(each[1]) == _LAST):
            if part.is_absolute() or ".." in part.parts:
                continue  # we never write such a name
            path = run.path / part
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, bytes(obstore.get(bucket, name).bytes()))
    except _FAILURES as problem:
        raise RuntimeFault(
            f"the report of {run.name} cannot be read at output {output}: {first_line(problem)}",
            "check that you may read it from here (the bucket's credentials), then repeat the command",
        ) from problem
    return True


def _files(run: RunFolder) -> Iterator[Path]:
    yield from (path for name in _WHOLE if (path := run.path / name).exists())
    yield from (path for path in sorted(run.logs.rglob("*")) if path.is_file())
