"""What lies where at OUTPUT/RUN/head, and what a state says.

::

    claims/000002.json             the second head of the run exists: a head with a lower number ends itself
    000002/state.json              what the files below are as of one moment; written last, every few seconds
    000002/grown/NAME/1/00000003   a file that only grows: its fourth part of 4 MiB, in its second life
    000002/whole/NAME/17           a small file, as it was in round 17

A folder per head, so that two heads never write to the same name. A part that is not full yet is written
again with what was added to the file: object stores cannot append. What lies there beyond a state belongs to
a state that was never written, and does not count. Checkpoints are beside it, in OUTPUT/RUN/checkpoints
(`trainer.artifacts.output`); a state names those that it covers: its event log has all that they rely on.

Secrets are not copied: the new head makes its own.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec
import obstore
from obstore import exceptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

FORMAT = 1
"""Of the copy: a head reads copies of its own format only."""
PART_BYTES = 4 * 1024 * 1024
FOLDER = "head"
MISSING = (exceptions.NotFoundError, FileNotFoundError)
FAILURES = (exceptions.BaseError, OSError, ValueError)
"""What a request to a bucket raises."""


class GrownCopy(msgspec.Struct, frozen=True):
    """A file that only grows: how much of it is there. `life`: it began anew so many times."""

    size: int
    crc32: int
    life: int


class WholeCopy(msgspec.Struct, frozen=True):
    """A small file, in the object `key`."""

    key: str
    size: int
    sha256: str


class HeadState(msgspec.Struct, kw_only=True):
    """What is there of a run's head. `at`: everything of before is there, by the head's clock, in seconds
    since the Unix epoch."""

    format: int = FORMAT
    version: str = ""
    """Of the program that wrote it."""
    run: str = ""
    head: int = 0
    """The head's number, from 1."""
    owner: str = ""
    """What the machines that it launched say of their owner."""
    at: float = 0.0
    round: int = 0
    grown: dict[str, GrownCopy] = {}
    whole: dict[str, WholeCopy] = {}
    checkpoints: dict[str, str] = {}
    """SHA-256 of the `digests.json` of each checkpoint that the event log covers, by folder."""
    ended: str = ""
    """How the run ended; empty while it is open."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the copy takes, without checkpoints."""
        grown = sum(each.size for each in self.grown.values())
        return grown + sum(each.size for each in self.whole.values())


def this_version() -> str:
    """Return the version of this program."""
    try:
        return version("rlboost")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def claim_key(head: int) -> str:
    """Return where head number `head` says that it exists."""
    return f"{FOLDER}/claims/{head:06d}.json"


def state_key(head: int) -> str:
    """Return where the state of head number `head` lies."""
    return f"{FOLDER}/{head:06d}/state.json"


def part_key(head: int, name: str, life: int, part: int) -> str:
    """Return where a part of a file that grows lies."""
    return f"{FOLDER}/{head:06d}/grown/{name}/{life}/{part:08d}"


def whole_key(head: int, name: str, number: int) -> str:
    """Return where a small file lies, as of round `number`."""
    return f"{FOLDER}/{head:06d}/whole/{name}/{number}"


def is_plain(name: str) -> bool:
    """Return True if a file of that name lies within the run's folder, as all that we copy do."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def read_state(bucket: ObjectStore, head: int) -> bytes | None:
    """Return the state of head number `head`, None where it never wrote one."""
    try:
        return bytes(obstore.get(bucket, state_key(head)).bytes())
    except MISSING:
        return None
