"""Fetch a weight version: several streams, each taking runs of adjacent chunks until none is left.

Guarantees: every chunk is verified before it is written; whatever may pass is tried again, with a pause, as
long as the pull as a whole makes progress; a chunk that comes wrong `MAX_CORRUPT` times ends the pull; what
was verified before a failure is kept for the next attempt (`part_folder`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlboost_runtime.errors import ProtocolError, RLBoostError, RuntimeFault
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import MANIFEST, Manifest
from rlboost_runtime.weights.part_folder import PartFolder, Piece, complete_version, part_folder, prune
from rlboost_runtime.weights.range_client import Damaged, RangeStream, Unusable, WeightSource

IDLE_S = 10.0
"""A connection on which no byte arrives for this long is given up."""
PROGRESS_S = 60.0
"""A pull in which no chunk was verified for this long is given up: 4 MiB in 60 s is 0.6 Mbit/s."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pause after a failed request, doubled from one to the next; drawn between half of it and all of it."""
MAX_CORRUPT = 3
"""A chunk that came wrong this often is wrong at its source."""
RANGE_BYTES = 32 * 1024 * 1024
"""Most bytes asked for at once: large against bandwidth times round trip of one stream."""
RANGES_PER_STREAM = 4
"""A pull is cut into at least so many requests per stream, for all streams to end at about the same time."""
MAX_MANIFEST_BYTES = 256 * 1024 * 1024


class PullRequest(msgspec.Struct, frozen=True):
    """What to fetch. `url`: the weight server, such as https://10.0.0.1:8443; `folder`: where versions lie
    here; `certificate`: PEM text; `keep`: how many versions stay in the folder."""

    url: str
    version: int
    folder: str
    token: str
    certificate: str
    streams: int = 4
    keep: int = 2


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds; see `IDLE_S` and `PROGRESS_S`."""

    idle_s: float = IDLE_S
    progress_s: float = PROGRESS_S


@dataclass(slots=True)
class Progress:
    """Verified bytes and all bytes of the version; written by the pull, read by anyone."""

    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pulled:
    """A version that lies complete in `folder`. `pulled_bytes`: fetched by this pull, not by a former one."""

    folder: Path
    pulled_bytes: int
    num_corrupt: int
    """Chunks that came with a wrong digest and were fetched again."""


def pull(request: PullRequest, progress: Progress, deadlines: Deadlines | None = None) -> Pulled:
    """Fetch a version and delete old ones; blocks. Raises `ProtocolError` and `RuntimeFault`.

    A version that is here already is verified, not fetched again.
    """
    deadlines = deadlines or Deadlines()
    if request.streams < 1 or request.keep < 1:
        raise ProtocolError(f"streams {request.streams}, keep {request.keep}", "both must be at least 1")
    source = WeightSource(request.url, request.version, request.token, request.certificate, deadlines.idle_s)
    manifest = _fetch_manifest(source, deadlines)
    progress.total_bytes = manifest.num_bytes
    folder = Path(request.folder)
    with part_folder(folder, manifest) as part:
        work = _Work(progress)
        path = complete_version(folder, manifest)
        if path is None:
            _fetch_missing(source, part, work, request.streams, deadlines)
            path = part.finish()
    progress.done_bytes = manifest.num_bytes
    prune(folder, request.version, request.keep)
    return Pulled(path, work.pulled_bytes, work.num_corrupt)


@dataclass(slots=True)
class _Work:
    """What is still to fetch, shared by the streams under one lock."""

    progress: Progress
    runs: deque[deque[Piece]] = field(default_factory=deque)
    """Each fetched by one request: adjacent chunks of one file."""
    num_left: int = 0
    """Chunks not verified yet, also those being fetched."""
    pulled_bytes: int = 0
    num_corrupt: int = 0
    corrupt: dict[int, int] = field(default_factory=dict)
    """Piece index -> times that it came wrong."""
    moved_at: float = field(default_factory=time.monotonic)
    trouble: str = "no answer"
    """What went wrong last, for the message when the pull is given up."""
    problem: RLBoostError | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def is_over(self) -> bool:
        """Whether there is nothing to do any more, for better or worse."""
        return self.num_left == 0 or self.problem is not None

    def take(self) -> deque[Piece] | None:
        """Return the next run, waiting while others hold all of them; None once it is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over() or self.runs)
            return None if self.is_over() else self.runs.popleft()

    def give_back(self, run: deque[Piece], trouble: str = "") -> None:
        """Return what was not fetched."""
        with self.changed:
            self.trouble = trouble or self.trouble
            if run:
                self.runs.appendleft(run)
            self.changed.notify_all()

    def count_verified(self, piece: Piece) -> None:
        """Count a chunk that is safely written."""
        with self.changed:
            self.num_left -= 1
            self.pulled_bytes += piece.chunk.length
            self.progress.done_bytes += piece.chunk.length
            self.moved_at = time.monotonic()
            self.changed.notify_all()

    def count_corrupt(self, piece: Piece) -> None:
        """Count a chunk that came wrong; too often is final."""
        with self.changed:
            self.num_corrupt += 1
            times = self.corrupt[piece.index] = self.corrupt.get(piece.index, 0) + 1
        if times >= MAX_CORRUPT:
            where = f"{piece.file.name} bytes {piece.chunk.offset}+{piece.chunk.length}"
            self.fail(
                RuntimeFault(
                    f"{where} came wrong {times} times", "the stored version is damaged: publish anew"
                )
            )

    def fail(self, problem: RLBoostError) -> None:
        """End the work; the first problem counts."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than the work lasts."""
        with self.changed:
            self.changed.wait_for(self.is_over, seconds)


def _fetch_manifest(source: WeightSource, deadlines: Deadlines) -> Manifest:
    stream = source.stream()
    give_up_at = time.monotonic() + deadlines.progress_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            manifest = manifests.decode_manifest(stream.read_file(MANIFEST, MAX_MANIFEST_BYTES))
            break
        except Unusable as exc:
            if time.monotonic() + pause_s > give_up_at:
                raise _stalled(deadlines.progress_s, str(exc)) from exc
        finally:
            stream.close()
        time.sleep(_jittered(pause_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    if manifest.version != source.version:
        raise ProtocolError(
            f"asked for version {source.version}, got the manifest of {manifest.version}",
            "publish the version again",
        )
    return manifest


def _fetch_missing(
    source: WeightSource, part: PartFolder, work: _Work, num_streams: int, deadlines: Deadlines
) -> None:
    missing = part.prepare()
    work.num_left = len(missing)
    work.runs = cut_into_runs(missing, num_streams)
    work.progress.done_bytes = work.progress.total_bytes - sum(piece.chunk.length for piece in missing)
    work.moved_at = time.monotonic()
    streams = [source.stream() for _ in range(min(num_streams, len(work.runs)))]
    with ThreadPoolExecutor(max(1, len(streams)), thread_name_prefix="stream") as pool:
        futures = [pool.submit(_run_stream, stream, part, work) for stream in streams]
        try:
            _watch(work, deadlines.progress_s)
        finally:
            for stream in streams:
                stream.abort()
    for future in futures:
        future.result()
    if work.problem is not None:
        raise work.problem


def cut_into_runs(missing: list[Piece], num_streams: int) -> deque[deque[Piece]]:
    """Group adjacent pieces, so that each group is one range of one file, in order."""
    total = sum(piece.chunk.length for piece in missing)
    limit = min(RANGE_BYTES, total // (num_streams * RANGES_PER_STREAM))
    runs: deque[deque[Piece]] = deque()
    size = 0
    for piece in missing:
        last = runs[-1][-1] if runs else None
        adjacent = last is not None and last.index + 1 == piece.index and last.file is piece.file
        if adjacent and size + piece.chunk.length <= limit:
            runs[-1].append(piece)
            size += piece.chunk.length
        else:
            runs.append(deque([piece]))
            size = piece.chunk.length
    return runs


def _watch(work: _Work, progress_s: float) -> None:
    """Wait for the end of the work, and end it where it stands still."""
    with work.changed:
        while not work.is_over():
            left = work.moved_at + progress_s - time.monotonic()
            if left <= 0:
                work.problem = _stalled(progress_s, work.trouble)
            work.changed.wait(max(0.0, left))
        work.changed.notify_all()


def _run_stream(stream: RangeStream, part: PartFolder, work: _Work) -> None:
    """Fetch runs until there are none: the life of one thread."""
    pause_s = FIRST_PAUSE_S
    try:
        while (run := work.take()) is not None:
            try:
                _fetch_run(stream, part, work, run)
            except (Unusable, Damaged) as exc:
                if isinstance(exc, Damaged):
                    work.count_corrupt(run[0])
                work.give_back(run, str(exc))
                work.pause(_jittered(pause_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
    except RLBoostError as exc:
        work.fail(exc)
    except BaseException as exc:  # the other streams must not wait for this one
        work.fail(RuntimeFault(f"a stream failed: {exc!r}", "see the traceback in the log"))
        raise
    finally:
        stream.close()


def _fetch_run(stream: RangeStream, part: PartFolder, work: _Work, run: deque[Piece]) -> None:
    """Fetch a run; takes from it what is done with, verified or given back alone."""
    file, start = run[0].file, run[0].chunk.offset
    end = run[-1].chunk.offset + run[-1].chunk.length
    buffer = memoryview(bytearray(max(piece.chunk.length for piece in run)))
    with stream.open_range(file.name, start, end, file.size) as fill:
        while run and not work.is_over():
            view = buffer[: run[0].chunk.length]
            fill(view)
            piece = run.popleft()
            if manifests.digest(view) == piece.chunk.blake3:
                part.write(piece, view)
                work.count_verified(piece)
            else:
                work.count_corrupt(piece)
                work.give_back(deque([piece]), f"{file.name}: wrong digest at {piece.chunk.offset}")


def _stalled(seconds: float, trouble: str) -> RuntimeFault:
    return RuntimeFault(
        f"the pull made no progress for {seconds:g} s (last: {trouble})",
        "check that the head is up and reachable from this machine",
    )


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing
