"""Which machine is the head of a run: the one with the highest number.

A head takes its number by writing a claim that nobody else can write (create, never replace). It looks for
the next number in every round of copying, and ends its run once there is one, so that two heads work on a run
for some seconds at most. Ages are compared by the bucket's own clock.
"""

from __future__ import annotations

import json
import socket
import uuid
from typing import TYPE_CHECKING

import obstore
from obstore import exceptions

from rlboost_runtime.backup.layout import FOLDER, MISSING, claim_key, state_key
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json, write_json

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SILENT_S = 20.0
"""A head that has copied nothing for so long is taken to be gone: it copies every 5 s."""


class HeadReplaced(RuntimeFault):
    """Another machine is the head of the run now."""

    exit_code = 2
    """The supervisor starts the process that raises it no more, and ends the run here."""


def own_number(run: RunFolder) -> int | None:
    """Return which head of the run this machine is; None: it has not claimed to be one yet."""
    found = read_json(run.generation)
    return None if found is None else int(found["head"])


def newest_head(bucket: ObjectStore) -> int:
    """Return the highest number that a head has claimed; 0: none."""
    keys = [entry["path"] for batch in obstore.list(bucket, f"{FOLDER}/claims") for entry in batch]
    numbers = [key.rpartition("/")[2].removesuffix(".json") for key in keys]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def claim(bucket: ObjectStore, run: RunFolder, head: int) -> None:
    """Become head number `head` of the run. Raises `HeadReplaced` where another machine was faster."""
    said = json.dumps({"host": socket.gethostname()}).encode()
    try:
        obstore.put(bucket, claim_key(head), said, mode="create", use_multipart=False)
    except exceptions.AlreadyExistsError as taken:
        raise replaced(run.name) from taken
    write_json(run.generation, {"head": head}, durably=True)


def require_newest(bucket: ObjectStore, run: RunFolder, head: int) -> None:
    """Raise `HeadReplaced` if a head after number `head` exists."""
    try:
        obstore.head(bucket, claim_key(head + 1))
    except MISSING:
        return
    raise replaced(run.name)


def replaced(run: str) -> HeadReplaced:
    """Return the error of a head that another one has replaced."""
    return HeadReplaced(
        f"another machine is the head of {run} now: it was resumed there from the copy at output",
        f"follow it there; the folder of {run} here is of no use any more: rlboost rm {run}",
    )


def silent_for(bucket: ObjectStore, head: int) -> float:
    """Return the seconds since head number `head` last wrote anything, by the bucket's clock."""
    probe = f"{FOLDER}/clock-{uuid.uuid4().hex}"
    obstore.put(bucket, probe, b"now", use_multipart=False)
    try:
        now = obstore.head(bucket, probe)["last_modified"]
    finally:
        obstore.delete(bucket, probe)
    seen = []
    for key in (state_key(head), claim_key(head)):
        try:
            seen.append(obstore.head(bucket, key)["last_modified"])
        except MISSING:
            continue
    return float((now - max(seen)).total_seconds()) if seen else SILENT_S
