"""Local copies of a run whose head is elsewhere: its small files, fetched on demand, and its results.

Guarantees: after `refresh` the run's folder reads like that of a run of this machine, as of this moment:
status, outcome, cost and logs are then shown by the same code. Only what has changed is sent. A copy is
replaced whole or appended to, by one command at a time; no other file is ever written, whatever the head
sends. What was fetched stays, so that cost and logs can be read when the head is gone.

`fetch_results` fetches the final model and the newest checkpoint: a file under its own name is complete; one
that was cut off is continued where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from rlboost_cli.head.connection import Head, HeadUnreachable, Say
from rlboost_runtime.errors import CredentialsRejected, ProtocolError, RuntimeFault
from rlboost_runtime.remote import head as program
from rlboost_runtime.run.folder import RunFolder, read_json, write_atomically, write_json
from rlboost_runtime.run.index import is_supervised

LIVE_S = 10.0
"""A status is written once a second; after this long without one the coordinator counts as silent."""
WAIT_S = 30.0
"""Longest wait for another command that is writing copies: it takes a moment."""
_WHOLE = frozenset({*program.WHOLE, program.LEDGER})
_FORMER = frozenset({"outcome.json", "ending.json"})
"""Removed here when a run is resumed; its head has them until the run goes on there."""
_GROWING = re.compile(r"(metrics|samples|evaluations)\.jsonl|logs(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")


def refresh(run: RunFolder, head: Head, *, ledger: bool = False, logs: bool = False) -> None:
    """Fetch what has changed; with `ledger` what the run has spent, with `logs` all logs and series. Raises
    `HeadUnreachable`, `CredentialsRejected`, `RuntimeFault`."""
    while True:
        known = _known(run)
        answer, blob = head.ask("mirror", known=known, ledger=ledger, logs=logs)
        _apply(run, known, answer, blob)
        if not answer["more"]:
            return


def is_live(run: RunFolder) -> bool:
    """Return True if the coordinator worked when the head was last seen, just now."""
    try:
        age_s = time.time() - run.status.stat().st_mtime
    except FileNotFoundError:
        return False
    return is_supervised(run) and age_s < LIVE_S


def refresh_if_elsewhere(
    run: RunFolder, *, ledger: bool = False, logs: bool = False, head: Head | None = None
) -> str | None:
    """Refresh a run whose head is elsewhere; return why the copies may be old, None where they are current.

    A head that refuses our credentials or fails counts as silent, so that other runs are still shown.
    `head`: an open connection to use.
    """
    if not run.head.exists() or is_complete(run):
        return None
    try:
        with contextlib.nullcontext(head) if head is not None else Head(run) as one:
            refresh_and_close(run, one, ledger=ledger, logs=logs)
    except (HeadUnreachable, CredentialsRejected, RuntimeFault) as silence:
        seen = read_json(run.mirror) or {}
        if "at" not in seen:
            return f"{silence.problem}; nothing was ever fetched from it"
        age_s = max(0.0, time.time() - float(seen["at"]))
        return f"{silence.problem}; showing the state of {age_s:.0f} s ago"
    return None


def refresh_and_close(run: RunFolder, head: Head, *, ledger: bool = False, logs: bool = False) -> None:
    """Refresh; of a run that has ended for good fetch everything, so that its head is not needed any more."""
    refresh(run, head, ledger=ledger, logs=logs)
    if run.outcome.exists() and not is_supervised(run):
        refresh(run, head, ledger=True, logs=True)
        close_mirror(run)


def open_mirror(run: RunFolder) -> None:
    """Note that the run is about to be started on its head: from now on it may go on there unseen."""
    write_json(run.mirror, {"marks": {}, **(read_json(run.mirror) or {})})


def was_started(run: RunFolder) -> bool:
    """Return True if the run may ever have been started on its head: something of it may be there only."""
    return "marks" in (read_json(run.mirror) or {})


def close_mirror(run: RunFolder) -> None:
    """Note that everything was fetched: the head is not asked again."""
    write_json(run.mirror, {**(read_json(run.mirror) or {"at": time.time()}), "complete": True})


def is_former_outcome(run: RunFolder, outcome: list[int] | None) -> bool:
    """Return True if the head's outcome, by its mark, is the one that the run was resumed after."""
    marks = (read_json(run.mirror) or {}).get("marks", {})
    return outcome is not None and not run.outcome.exists() and marks.get(run.outcome.name) == outcome


def former_end_ns(run: RunFolder) -> int:
    """Return when the run ended before it was resumed, by its head's clock; 0 if it was never resumed."""
    seen = read_json(run.mirror) or {}
    former = None if run.outcome.exists() else seen.get("marks", {}).get(run.outcome.name)
    return max(int(seen.get("former_end_ns", 0)), 0 if former is None else int(former[1]))


def forget_former_outcome(run: RunFolder) -> None:
    """Fetch the outcome again after which the run was to be resumed: that resumption was given up."""
    seen = read_json(run.mirror) or {}
    former = [name for name in _FORMER & seen.get("marks", {}).keys() if not (run.path / name).exists()]
    for name in former:
        del seen["marks"][name]
    if former:
        seen.pop("former_end_ns", None)
        write_json(run.mirror, seen)


def is_complete(run: RunFolder) -> bool:
    """Return True if everything was fetched after the run had ended."""
    return run.outcome.exists() and bool((read_json(run.mirror) or {}).get("complete"))


def _known(run: RunFolder) -> dict[str, list[int]]:
    """Return the marks of the copies that are here still, and of an end that the run was resumed after."""
    marks = (read_json(run.mirror) or {}).get("marks", {})
    return {name: mark for name, mark in marks.items() if name in _FORMER or (run.path / name).exists()}


def _apply(run: RunFolder, asked: dict[str, list[int]], answer: dict[str, Any], blob: bytes) -> None:
    """Write the files of an answer to a request with the marks `asked`; a file that another command has
    fetched meanwhile stays as that left it."""
    with _writing(run):
        marks, ended_ns, at = _known(run), former_end_ns(run), 0
        for entry in answer["files"]:
            part, at = blob[at : at + entry["bytes"]], at + entry["bytes"]
            if marks.get(entry["name"]) == asked.get(entry["name"]):
                _write_copy(run, entry, part)
                marks[entry["name"]] = entry["mark"]
        for name in answer["gone"]:
            if name in _WHOLE and marks.get(name) == asked.get(name):
                (run.path / name).unlink(missing_ok=True)
                marks.pop(name, None)
        seen = {
            "at": time.time(),
            "supervised": bool(answer["supervised"]),
            "marks": marks,
            "former_end_ns": ended_ns,
        }
        write_json(run.mirror, seen)


@contextlib.contextmanager
def _writing(run: RunFolder) -> Iterator[None]:
    """Keep other commands here from writing copies. Raises `RuntimeFault` where one does so for too long."""
    fd, deadline = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + WAIT_S
    try:
        while not _locks(fd):
            if time.monotonic() > deadline:
                raise RuntimeFault(
                    f"another command has been updating the local copy of {run.name} for {WAIT_S:.0f} s",
                    "check whether it is suspended (Ctrl-Z), then repeat the command",
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system that cannot lock a folder
    return True


def _write_copy(run: RunFolder, entry: dict[str, Any], part: bytes) -> None:
    name, offset = str(entry["name"]), entry["offset"]
    path = run.path / name
    if name not in _WHOLE and (_GROWING.fullmatch(name) is None or offset is None):
        raise ProtocolError(
            f"the head of {run.name} sends {name!r}, which was not requested",
            "check that it is the right machine",
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if name in _WHOLE:
        write_atomically(path, part)
    else:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.truncate(offset)
            file.seek(offset)
            file.write(part)
    changed_at = time.time() - float(entry["age"])
    os.utime(path, (changed_at, changed_at))


_PART = ".part"


def fetch_results(run: RunFolder, head: Head, say: Say) -> int:
    """Fetch what is not here yet; return the bytes that were moved. Raises `HeadUnreachable`, and
    `RuntimeFault` where the disk here has no room."""
    answer, _ = head.ask("results")
    wanted = [
        (_path(run, str(name)), str(name), int(size), int(changed_ns))
        for name, size, changed_ns in answer["files"]
    ]
    missing = [one for one in wanted if not _is_here(one[0], one[2], one[3])]
    total = sum(size for _, _, size, _ in missing)
    free = shutil.disk_usage(run.path).free
    if total > free:
        raise RuntimeFault(
            f"the results of {run.name} take {total / 1e9:.2f} GB,"
            f" but this disk has {free / 1e9:.2f} GB free",
            f"make room, then repeat the command; they stay on {head.place.host} until then",
        )
    moved = 0
    for path, name, size, changed_ns in missing:
        part = path.with_name(f"{path.name}.{changed_ns}{_PART}")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with part.open("ab") as file:
            while (offset := file.tell()) < size:
                say(
                    f"fetching {name} from {head.place.host}: {(moved + 1) / 1e6:.1f} of {total / 1e6:.1f} MB"
                )
                _, block = head.ask("fetch", name=name, offset=offset)
                if not block:
                    raise RuntimeFault(f"{name} became shorter on {head.place.host}", "repeat the command")
                file.write(block)
                moved += len(block)
        os.utime(part, ns=(changed_ns, changed_ns))
        os.replace(part, path)
    return moved


def _is_here(path: Path, size: int, changed_ns: int) -> bool:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return False
    return (facts.st_size, facts.st_mtime_ns) == (size, changed_ns)


def _path(run: RunFolder, name: str) -> Path:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or pure.parts[:1] != ("checkpoints",):
        raise ProtocolError(
            f"the head of {run.name} offers {name!r}, which is no checkpoint",
            "check that it is the right machine",
        )
    return run.path / pure
