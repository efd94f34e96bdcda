"""What an agent and its two weight children (`pull.child`, `serve.peer`) write to each other.

One JSON object per line. The agent writes one request to the child's stdin. The puller answers with
`PullProgress` lines, then a `PullReport` (exit code 0); the peer server with a `PeerListening`; either with a
`ChildFailure` (exit code 1) instead.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path

import msgspec

from rlboost_runtime.protocol.messages import PeerListening

MAX_REQUEST_BYTES = 1024 * 1024
DEFAULT_BYTES_PER_S = 125e6
"""Assumed for the link before anything was pulled over it: 1 Gbit/s."""


class SourceKind(StrEnum):
    """What a source is."""

    HEAD = "head"
    PEER = "peer"
    """May have a part only, and reports which."""
    BUCKET = "bucket"


class PullSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Somebody to pull from.

    `url`: https://HOST:PORT, or s3://BUCKET/PREFIX and the like; `certificate`: PEM text of its server, empty
    for a bucket; `usd_per_gb`: what a GB (10^9) from there to here costs.
    """

    name: str
    kind: SourceKind
    url: str
    certificate: str = ""
    usd_per_gb: float = 0.0
    token: str = ""
    """A peer's own; the head's never goes to a peer."""


class TransferSettings(StrEnum):
    """The job's `weights.transfer`."""

    AUTO = "auto"
    """Whatever costs less."""
    FULL = "full"
    """Always whole."""
    DELTA = "delta"
    """By deltas whenever there is a base for them."""


class PullRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version to fetch. `url`: the head's weight server, such as https://10.0.0.1:8443; `folder`: where
    versions lie here; `certificate`: PEM text; `keep`: how many versions stay in the folder.

    `streams`: from the head and from a bucket, at most. As many as this process has cores begin, the others
    where those leave cores idle: over a long way a stream brings little, and more of them bring more, but
    where cores are the limit more streams than cores only take turns.
    """

    url: str
    version: int
    folder: str
    token: str
    certificate: str
    streams: int = 4
    keep: int = 2
    extra_sources: tuple[PullSource, ...] = ()
    """Peers and buckets that may have the version too."""
    part: tuple[int, int] = (0, 1)
    """(i, n): which slice to take from the head where n instances of a zone pull at once; (0, 0): none."""
    digest: str = ""
    """The version's content digest, where it is known."""
    store: str = ""
    """The head's store, where it lies on this machine."""
    siblings: tuple[str, ...] = ()
    """The folders of this machine's other engines."""
    transfer: TransferSettings = TransferSettings.AUTO
    usd_per_gb: float = 0.0
    """Of egress from the head, 10^9 bytes."""
    usd_per_hour: float = 0.0
    """Of the machine that waits."""
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    """Expected of the link."""
    serves: bool = False
    """Whether an engine here serves an older version meanwhile."""
    keep_in: str = "disk"
    """The job's `weights.keep_in`."""
    receiver: str = ""
    """Who pulls: servers give each receiver a share."""

    @property
    def all_sources(self) -> tuple[PullSource, ...]:
        """The head, then everybody else."""
        head = PullSource("head", SourceKind.HEAD, self.url, self.certificate, self.usd_per_gb)
        return (head, *self.extra_sources)


class PullProgress(msgspec.Struct, tag=True):
    """Verified bytes and all bytes of the version; written by the pull, read by anyone."""

    done_bytes: int = 0
    total_bytes: int = 0
    moved_bytes: int = 0
    """Bytes dealt with in any way, deltas included: grows as long as the pull is alive."""

    def verified(self, num_bytes: int) -> None:
        """Count bytes that were here already and were read again."""
        self.moved_bytes += num_bytes


class PullReport(msgspec.Struct, tag=True):
    """A version that lies complete and verified in `folder`, and how it got there."""

    version: int
    folder: str
    how: str = "here"
    """here: nothing was fetched; linked: from a store on this machine; full; delta; part: a large file was
    that of a version that is here."""
    pulled_bytes: int = 0
    """Fetched by this pull, not by a former one."""
    full_bytes: int = 0
    restored_bytes: int = 0
    """Made of a base that was here."""
    num_corrupt: int = 0
    """Chunks that came with a wrong digest and were fetched again."""
    pull_s: float = 0.0
    fetch_s: float = 0.0
    """Of these, seconds in which bytes were fetched."""
    sources: dict[str, int] = {}
    """Fetched bytes by source: head, bucket, or a peer's instance name."""
    complaints: dict[str, str] = {}
    """Sources that were left out, and why."""

    @property
    def path(self) -> Path:
        """The version's folder."""
        return Path(self.folder)


class PeerRequest(msgspec.Struct, frozen=True):
    """What to serve to peers. `host`: this machine's address as its zone sees it; loopback: only itself."""

    folder: str
    token: str
    host: str


class ChildFailure(msgspec.Struct, frozen=True, tag=True):
    """The child cannot do what was requested, and ends."""

    problem: str


def read_line(fd: int) -> bytes:
    """Return the first line, unbuffered: what follows it is for `select`."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_REQUEST_BYTES:
        data = os.read(fd, 65536)
        if not data:
            break
        line += data
    return line


def send(message: PullProgress | PullReport | PeerListening | ChildFailure) -> None:
    """Write a line for the agent; end the process if the agent is gone."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)
