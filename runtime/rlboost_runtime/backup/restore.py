"""From the copy of a lost head to a run's folder on this machine.

Guarantees: every file is checked against the state (size and checksum) and every file of the checkpoint
against the copy's own list; a checkpoint that is not whole, or that the event log does not cover, falls back
to the one before. A file that grows and has a damaged part is cut before it, which a restart treats like a
power cut, and is named. Nothing is taken from a state that another format wrote.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import obstore

from rlboost_runtime.backup.fence import SILENT_S, claim, newest_head, silent_for
from rlboost_runtime.backup.layout import (
    FAILURES,
    FORMAT,
    MISSING,
    PART_BYTES,
    GrownCopy,
    HeadState,
    WholeCopy,
    is_plain,
    part_key,
    read_state,
    this_version,
)
from rlboost_runtime.errors import ConfigError, NotFound, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.logs import event
from rlboost_runtime.run.bucket import COMPLETE, first_line
from rlboost_runtime.run.folder import RunFolder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

Say = Callable[[str], None]
_LOOK_S = 1.0
_MUST_BE_WHOLE = ("job.json", "ledger.sqlite")
"""Without these a run cannot go on; others are made again or can be missed."""


@dataclass(slots=True)
class Restored:
    """What was brought here."""

    checkpoint: str = ""
    """The folder of the checkpoint; empty: the run had none yet, and begins with its model."""
    problems: list[str] = field(default_factory=list)
    """What of the copy was damaged or missing, in words."""


def find_copy(bucket: ObjectStore, url: str) -> HeadState:
    """Return the newest state of the run's head. Raises `NotFound` where there is none, `ConfigError` where
    it cannot be resumed from, and `RuntimeFault` where the bucket does not answer."""
    try:
        heads = range(newest_head(bucket), 0, -1)
        found = next((data for head in heads if (data := read_state(bucket, head)) is not None), None)
    except FAILURES as problem:
        raise _unreadable(url, problem) from problem
    if found is None:
        raise NotFound(
            f"there is no copy of a head at {url}",
            "give OUTPUT/RUN: the job's output and the run's name, such as s3://BUCKET/PREFIX/RUN",
        )
    said = msgspec.json.decode(found)
    if said.get("format") != FORMAT:
        raise ConfigError(
            f"the copy at {url} was written by RLBoost {said.get('version')} in format {said.get('format')};"
            f" this is {this_version()}, which reads format {FORMAT}",
            f"install rlboost=={said.get('version')} here",
        )
    state = msgspec.convert(said, HeadState)
    if state.ended == "done":
        raise ConfigError(
            f"{state.run} is done: there is nothing to resume at {url}",
            f"its model is at {url}/model; a job file with model: FOLDER begins with it",
        )
    return state


def job_of(bucket: ObjectStore, state: HeadState, url: str) -> Job:
    """Return the run's resolved job. Raises `RuntimeFault` where it is damaged or another version's."""
    copy = state.whole.get("job.json")
    try:
        if copy is None:
            raise ValueError("it is missing")
        value: dict[str, Any] = msgspec.json.decode(_whole(bucket, copy))
        value.pop("crc32", None)
        return Job.model_validate_json(msgspec.json.encode(value))
    except FAILURES as problem:
        raise RuntimeFault(
            f"the job of {state.run} at {url} cannot be read: {first_line(problem)}",
            f"use the RLBoost version that the run was started with ({state.version})",
        ) from problem


def take_over(bucket: ObjectStore, draft: RunFolder, state: HeadState, url: str, say: Say) -> int:
    """Become the run's head; return its number. Waits until the former one has been silent for `SILENT_S`.

    Raises `ConfigError` where that one still copies, and `HeadReplaced` where another machine is faster.
    """
    try:
        newest = newest_head(bucket)
        if not state.ended:
            _require_silence(bucket, newest, state, url, say)
        claim(bucket, draft, newest + 1)
    except FAILURES as problem:
        raise _unreadable(url, problem) from problem
    return newest + 1


def _require_silence(bucket: ObjectStore, head: int, state: HeadState, url: str, say: Say) -> None:
    before = silent_for(bucket, head)
    while before < SILENT_S:
        say(f"waiting until the former head of {state.run} has been silent for {SILENT_S:.0f} s")
        time.sleep(_LOOK_S)
        silent_s = silent_for(bucket, head)
        if silent_s < before:
            raise ConfigError(
                f"another head of {state.run} is alive: it copied to {url} {silent_s:.0f} s ago",
                f"end it there first (rlboost down {state.run}), or continue there",
            )
        before = silent_s


def download(bucket: ObjectStore, state: HeadState, draft: RunFolder, url: str, say: Say) -> Restored:
    """Bring what `state` names into the folder `draft`. Raises `RuntimeFault` where what a run cannot do
    without is missing, or the bucket does not answer."""
    found = Restored()
    try:
        for name, whole in state.whole.items():
            _bring_whole(bucket, name, whole, draft, found)
        for number, (name, grown) in enumerate(sorted(state.grown.items())):
            say(f"reading {name} ({number + 1} of {len(state.grown)})")
            _bring_grown(bucket, state.head, name, grown, draft, found)
        _bring_checkpoint(bucket, state, draft, found, say)
    except FAILURES as problem:
        raise _unreadable(url, problem) from problem
    if draft.events.exists():  # the run's clock goes on from there
        os.utime(draft.events, (state.at, state.at))
    for text in found.problems:
        event(log, "restore.damaged", level=logging.WARNING, problem=text)
    return found


# --- files -------------------------------------------------------------------------------------------------


def _bring_whole(bucket: ObjectStore, name: str, copy: WholeCopy, draft: RunFolder, found: Restored) -> None:
    if not is_plain(name):
        return  # we never write such a name
    try:
        data = _whole(bucket, copy)
    except (*MISSING, ValueError) as problem:
        what = f"{name}: {first_line(problem)}"
        if name in _MUST_BE_WHOLE:
            raise RuntimeFault(
                f"the copy of the head is damaged: {what}",
                "start a new run; its checkpoints are models that it can begin with (docs/resuming.md)",
            ) from problem
        found.problems.append(what)
        return
    path = draft.path / _place_of(name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)


def _place_of(name: str) -> str:
    """Return where a file is restored: manifests of versions that this head does not have are put aside."""
    parts = name.split("/")
    if parts[0] != "weights":
        return name
    return f"former_versions/{parts[2] if parts[1] == 'former' else f'{parts[1]}.json'}"


def _whole(bucket: ObjectStore, copy: WholeCopy) -> bytes:
    """Return a small file. Raises `ValueError` where it is not as it was written."""
    data = bytes(obstore.get(bucket, copy.key).bytes())
    if len(data) != copy.size or hashlib.sha256(data).hexdigest() != copy.sha256:
        raise ValueError("its checksum is another one")
    return data


def _bring_grown(
    bucket: ObjectStore, head: int, name: str, copy: GrownCopy, draft: RunFolder, found: Restored
) -> None:
    """Write the parts of a file up to its length; stop before the first that is missing or too short."""
    if not is_plain(name):
        return
    path = draft.path / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    crc = written = 0
    with path.open("wb") as file:
        path.chmod(0o600)
        for part in range(-(-copy.size // PART_BYTES)):
            due = min(PART_BYTES, copy.size - part * PART_BYTES)
            try:
                data = bytes(obstore.get(bucket, part_key(head, name, copy.life, part)).bytes())[:due]
            except MISSING:
                data = b""
            crc = zlib.crc32(data, crc)
            written += file.write(data)
            if len(data) < due:
                found.problems.append(f"{name}: {copy.size - written} of {copy.size} bytes are missing")
                return
        if crc != copy.crc32:  # its own checksums find the place
            found.problems.append(f"{name}: its checksum is another one")


# --- checkpoints -------------------------------------------------------------------------------------------


def _bring_checkpoint(
    bucket: ObjectStore, state: HeadState, draft: RunFolder, found: Restored, say: Say
) -> None:
    draft.checkpoints.mkdir(mode=0o700, exist_ok=True)
    listed = obstore.list_with_delimiter(bucket, "checkpoints")["common_prefixes"]
    names = [each.strip("/").rpartition("/")[2] for each in listed]
    unfit = []
    for name in sorted(names, key=lambda name: (len(name), name), reverse=True):
        if name not in state.checkpoints:
            unfit.append(name)  # of after the state
            continue
        say(f"reading the checkpoint {name}")
        problem = _bring_folder(bucket, name, state.checkpoints[name], draft.checkpoints / name)
        if problem is None:
            found.checkpoint = name
            break
        unfit.append(name)
        found.problems.append(f"checkpoint {name}: {problem}; the one before is used")
    if state.checkpoints and not found.checkpoint:
        event(log, "restore.no_checkpoint", level=logging.WARNING, of=list(state.checkpoints))
        why = "; ".join(found.problems) or "none has arrived"
        raise RuntimeFault(
            f"no checkpoint of {state.run} is whole at its output: {why}",
            "start a new run, from a model that you have",
        )
    for name in unfit:
        _delete_folder(bucket, f"checkpoints/{name}")


def _bring_folder(bucket: ObjectStore, name: str, digests_sha256: str, folder: Path) -> str | None:
    """Bring a checkpoint; return what is wrong with it, and then leave nothing of it here."""
    prefix = f"checkpoints/{name}"
    problem = None
    try:
        files = msgspec.json.decode(bytes(obstore.get(bucket, f"{prefix}/{COMPLETE}").bytes()))
        if files.get("digests.json", {}).get("sha256") != digests_sha256:
            return "it is another head's"
        folder.mkdir(mode=0o700)
        for file, due in files.items():
            if is_plain(file) and not _bring_file(bucket, f"{prefix}/{file}", folder / file, due):
                problem = f"{file} is not as it was written"
                break
    except MISSING as missing:
        problem = f"something is missing: {first_line(missing)}"
    if problem is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return problem


def _bring_file(bucket: ObjectStore, key: str, path: Path, due: dict[str, Any]) -> bool:
    """Bring a file, in pieces; return True if size and checksum are those that are due."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in obstore.get(bucket, key).stream(min_chunk_size=PART_BYTES):
            digest.update(piece)
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return (size, digest.hexdigest()) == (due["size"], due["sha256"])


def _delete_folder(bucket: ObjectStore, prefix: str) -> None:
    """Delete a checkpoint that nobody can go on from: the new head would otherwise keep it as its newest."""
    keys = [entry["path"] for batch in obstore.list(bucket, prefix) for entry in batch]
    for key in sorted(keys, key=lambda each: not each.endswith(COMPLETE)):
        obstore.delete(bucket, key)


def _unreadable(url: str, problem: Exception) -> RuntimeFault:
    return RuntimeFault(
        f"{url} cannot be used: {first_line(problem)}",
        "check the address, and that this machine's credentials may read, write and list there",
    )
