"""Fetch a weight version: whole or by deltas, over several streams, from every source that has it.

In order: a version that is here already is verified and kept; one that lies in a store on this machine, or
that another engine of this machine has fetched, is linked, not copied; else deltas are fetched and applied
where that costs less and there is a base for them; what is then still missing is fetched whole, chunk by
chunk (`weights.pull.chunk_scheduler`).

Guarantees: a chunk counts only once its digest is the manifest's, wherever it came from and however it was
made, so a wrong base, a damaged delta or a lying source can cost time but never give wrong weights; what may
pass is tried again, with a pause, as long as the pull as a whole makes progress; what was verified before
a failure is kept for the next attempt (`part_folder`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.errors import ProtocolError, RLBoostError, RuntimeFault
from rlboost_runtime.run import in_memory
from rlboost_runtime.seams import Backoff
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.child_pipe import (
    PullProgress,
    PullReport,
    PullRequest,
    PullSource,
    SourceKind,
    TransferSettings,
)
from rlboost_runtime.weights.manifest import MANIFEST, MAX_MANIFEST_BYTES, Delta, Manifest
from rlboost_runtime.weights.pull.chunk_scheduler import ChunkRange, ChunkScheduler, SourceState
from rlboost_runtime.weights.pull.range_client import Absent, Damaged, RangeStream, Unusable
from rlboost_runtime.weights.pull.sources import (
    LinkCost,
    Stream,
    VersionSource,
    link_sibling,
    link_version,
    num_deltas,
    open_source,
    turn,
)
from rlboost_runtime.weights.store.part_folder import PartFolder, Piece, complete_version, part_folder, prune
from rlboost_runtime.weights.store.placing import VersionPlacing

IDLE_S = 10.0
"""A connection on which no byte arrives for this long is given up."""
PROGRESS_S = 60.0
"""A pull in which no chunk was verified for this long is given up: 4 MiB in 60 s is 0.6 Mbit/s."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pause after a failed request, doubled from one to the next; drawn between half of it and all of it."""
LOOK_S, LONGEST_LOOK_S = 0.2, 1.0
"""How often a stream with nothing to do asks its peer which chunks it has: half as often while that does not
change, as seven peers of eight receivers that ask cost half a core."""
LEAST_STREAMS = 2
"""One of them waits for an answer while the other one works."""
SPARE_S = 0.5
"""How often streams in reserve check whether the others leave cores idle, so that more could help."""
SPARE_BELOW = 1 / 3
"""Streams that use less of a core each than this are idling: where the head shares the cores, it is 0.6."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds; see `IDLE_S` and `PROGRESS_S`."""

    idle_s: float = IDLE_S
    progress_s: float = PROGRESS_S


def pull(request: PullRequest, progress: PullProgress, deadlines: Deadlines | None = None) -> PullReport:
    """Fetch a version and delete old ones; blocks. Raises `ProtocolError` and `RuntimeFault`.

    A version that is here already is verified, not fetched again.
    """
    began = time.monotonic()
    deadlines = deadlines or Deadlines()
    if request.streams < 1 or request.keep < 1:
        raise ProtocolError(f"streams {request.streams}, keep {request.keep}", "both must be at least 1")
    folder = Path(request.folder)
    placing = VersionPlacing(
        folder, request.keep_in, request.keep + 1, others=lambda: in_memory.available_memory() // 2
    )  # the engine's share
    with turn(folder.parent, progress) if request.siblings else nullcontext():
        linked = _link(request, folder, placing)
        if linked is not None:
            prune(folder, request.version, request.keep)
            full_bytes = manifests.read_manifest(linked).num_bytes
            report = PullReport(request.version, str(linked), how="linked", full_bytes=full_bytes)
        else:
            report = _Pull(request, progress, deadlines).run(folder, placing)
    report.pull_s = round(time.monotonic() - began, 6)
    return report


def _link(request: PullRequest, folder: Path, placing: VersionPlacing) -> Path | None:
    """Return the version, linked from wherever it lies on this machine; None if it does not."""
    siblings = [Path(each) for each in request.siblings]
    stores = [Path(request.store), *siblings] if request.store else siblings
    any(placing.prepare_beside(each) for each in stores)
    found = link_version(Path(request.store), request.version, folder, request.digest)
    return found or link_sibling(siblings, request.version, folder, request.digest)


class _Pull:
    """One pull over the network."""

    def __init__(self, request: PullRequest, progress: PullProgress, deadlines: Deadlines) -> None:
        self._request = request
        self._progress = progress
        self._deadlines = deadlines
        self._sources: list[tuple[PullSource, VersionSource]] = []
        self._complaints: dict[str, str] = {}
        for source in request.all_sources:
            try:
                opened = open_source(
                    source, request.version, request.token, deadlines.idle_s, request.receiver
                )
            except ProtocolError as exc:
                if source.kind is not SourceKind.PEER:
                    raise
                self._complaints[source.name] = exc.problem  # peers describe themselves, unchecked
            else:
                self._sources.append((source, opened))
        prices = sorted({source.usd_per_gb for source, _ in self._sources})
        self._ranks = {price: i + 1 for i, price in enumerate(prices)}

    def run(self, folder: Path, placing: VersionPlacing) -> PullReport:
        """Fetch the version, and delete old ones."""
        request = self._request
        manifest = self._fetch_manifest()
        placing.prepare(manifest.num_bytes)
        self._progress.total_bytes = manifest.num_bytes
        with part_folder(folder, manifest, self._progress.verified) as part:
            path = complete_version(folder, manifest, self._progress.verified)
            report = PullReport(request.version, str(path), full_bytes=manifest.num_bytes)
            report.complaints = self._complaints
            if path is None:
                missing = part.prepare(_versions(folder))
                report.how = "part" if part.linked_bytes else "full"
                plan = self._plan_deltas(folder, manifest, missing)
                if plan is not None:
                    missing = self._restore(part, plan, missing, report)
                self._fetch(part, missing, report)
                report.folder = str(part.finish())
        self._progress.done_bytes = manifest.num_bytes
        prune(folder, request.version, request.keep)
        return report

    # --- deltas -------------------------------------------------------------------------------------------

    def _plan_deltas(self, folder: Path, manifest: Manifest, missing: list[Piece]) -> _DeltaPlan | None:
        """Return the deltas to fetch and the base for them; None to fetch the version whole."""
        request = self._request
        if not manifest.deltas or request.transfer is TransferSettings.FULL:
            return None
        target = manifest.deltas[0].target
        bases = [_base(folder, delta) for delta in manifest.deltas]
        sizes: list[int | None] = []
        total = 0
        for delta, base in zip(manifest.deltas, bases, strict=True):
            total += delta.file.size
            sizes.append(None if base is None else total)
        link = LinkCost(request.bytes_per_s, request.usd_per_gb, request.usd_per_hour)
        full_bytes = sum(piece.chunk.length for piece in missing if piece.file.name == target)
        num = num_deltas(request.transfer, full_bytes, sizes, link)
        base = bases[num - 1] if num else None
        return None if base is None else _DeltaPlan(manifest.deltas[:num], base / target)

    def _restore(
        self, part: PartFolder, plan: _DeltaPlan, missing: list[Piece], report: PullReport
    ) -> list[Piece]:
        """Fetch the deltas, apply them, and return what is still missing."""
        from rlboost_runtime.weights.pull.restore import restore  # numba: a second to import

        try:
            self._fetch(part, part.prepare_deltas(plan.deltas), report, are_own=False)
        except RuntimeFault as exc:
            report.complaints["delta"] = exc.problem
            return missing
        target = [piece for piece in missing if piece.file.name == plan.deltas[0].target]
        paths = [part.file(delta.file.name) for delta in reversed(plan.deltas)]
        report.restored_bytes = restore(part, plan.base, paths, target, self._progress)
        report.how = "delta" if report.restored_bytes else "full"
        wrong = sum(piece.chunk.length for piece in target) - report.restored_bytes
        if wrong:
            report.complaints["delta"] = f"{wrong} bytes did not come out right and are fetched whole"
        return part.missing()

    # --- bytes --------------------------------------------------------------------------------------------

    def _fetch(
        self, part: PartFolder, missing: list[Piece], report: PullReport, *, are_own: bool = True
    ) -> None:
        if not missing:
            return
        started = time.monotonic()
        request = self._request
        size = sum(piece.chunk.length for piece in missing)
        if are_own:
            self._progress.done_bytes = self._progress.total_bytes - size
        has_peers = any(source.kind is SourceKind.PEER for source, _ in self._sources)
        rank, num = request.part if has_peers else (0, 1)
        scheduler = ChunkScheduler(
            missing, self._progress, request.streams, (rank, num) if num else None, are_own=are_own
        )
        streams = list(self._streams(scheduler, size))
        with ThreadPoolExecutor(len(streams), thread_name_prefix="stream") as pool:
            futures = [pool.submit(_run_stream, each, part, scheduler) for each in streams]
            try:
                _watch(scheduler, self._deadlines.progress_s)
            finally:
                for each in streams:
                    each.stream.abort()
        for future in futures:
            future.result()
        _count(report, scheduler)
        report.fetch_s += time.monotonic() - started
        if scheduler.problem is not None:
            raise scheduler.problem

    def _streams(self, scheduler: ChunkScheduler, size: int) -> Iterator[_Reader]:
        """Yield the streams to read with: one per peer, several for each other source."""
        num_first = max(LEAST_STREAMS, _num_cores())
        for source, opened in self._sources:
            is_peer = source.kind is SourceKind.PEER
            rank = 0 if is_peer else self._ranks[source.usd_per_gb]
            is_extra, has = source.kind is not SourceKind.HEAD, b"" if is_peer else None
            state = SourceState(source.name, is_peer, rank, is_extra=is_extra, has=has)
            scheduler.add_source(state)
            if not self._request.serves:
                opened.left_bytes = size
            for i in range(1 if is_peer else self._request.streams):
                yield _Reader(state, opened.stream(), spare_after=num_first if i >= num_first else 0)

    def _fetch_manifest(self) -> Manifest:
        """Fetch the manifest from the head, or from a bucket where the head does not answer."""
        origins = [(s, o) for s, o in self._sources if s.kind is SourceKind.HEAD or self._is_vouched_for(s)]
        give_up_at = time.monotonic() + self._deadlines.progress_s
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            for source, opened in origins:
                try:
                    return self._read_manifest(source, opened)
                except Absent as exc:
                    if len(origins) == 1:
                        raise
                    problem: Exception = exc
                except Unusable as exc:
                    problem = exc
            pause_s = backoff.next_s()
            if time.monotonic() + pause_s > give_up_at:
                raise _stalled(self._deadlines.progress_s, str(problem)) from problem
            time.sleep(pause_s)

    def _is_vouched_for(self, source: PullSource) -> bool:
        """Return True if we would notice that it gave us another manifest."""
        return source.kind is SourceKind.BUCKET and self._request.digest != ""

    def _read_manifest(self, source: PullSource, opened: VersionSource) -> Manifest:
        stream = opened.stream()
        try:
            manifest = manifests.decode_manifest(stream.read_file(MANIFEST, MAX_MANIFEST_BYTES))
        finally:
            stream.close()
        request = self._request
        if manifest.version != request.version:
            raise ProtocolError(
                f"asked for version {request.version}, got the manifest of {manifest.version}",
                "publish the version again",
            )
        if request.digest not in ("", manifest.content_digest):
            problem = f"{source.name} has version {request.version} with other content than was announced"
            if source.kind is SourceKind.HEAD:
                raise ProtocolError(problem, "publish the weights under a new number")
            raise Unusable(problem)
        return manifest


@dataclass(frozen=True, slots=True)
class _Reader:
    """A stream and its source. `spare_after`: it begins once so many streams leave cores idle; 0: at once."""

    source: SourceState
    stream: Stream
    spare_after: int


@dataclass(frozen=True, slots=True)
class _DeltaPlan:
    """Deltas, the newest first, and the file that the last of them starts from."""

    deltas: tuple[Delta, ...]
    base: Path


def _versions(folder: Path) -> list[Path]:
    """Return the versions that are here, the newest first."""
    found = [path for path in folder.iterdir() if manifests.parse_version_name(path.name) is not None]
    return sorted(found, reverse=True)


def _base(folder: Path, delta: Delta) -> Path | None:
    """Return the folder of the version that the delta starts from, None if it is not here."""
    path = folder / manifests.version_name(delta.base)
    try:
        found = manifests.read_manifest(path)
    except ProtocolError:
        return None
    return path if found.content_digest == delta.base_digest else None


def _count(report: PullReport, scheduler: ChunkScheduler) -> None:
    report.pulled_bytes += scheduler.fetched_bytes
    report.num_corrupt += scheduler.num_corrupt
    for state in scheduler.sources:
        if state.fetched_bytes:
            report.sources[state.name] = report.sources.get(state.name, 0) + state.fetched_bytes
        if state.problem is not None:
            report.complaints[state.name] = state.problem


def _watch(scheduler: ChunkScheduler, progress_s: float) -> None:
    """Wait until all is fetched or failed; fail it if it makes no progress."""
    with scheduler.changed:
        while not scheduler.is_over():
            left = scheduler.moved_at + progress_s - time.monotonic()
            if left <= 0:
                scheduler.fail(_stalled(progress_s, scheduler.trouble))
            scheduler.changed.wait(max(0.0, left))
        scheduler.changed.notify_all()


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait_for_idle_cores(scheduler: ChunkScheduler, num_streams: int) -> None:
    """Wait until so many streams use less than `SPARE_BELOW` of a core each, or nothing is left to fetch."""
    used_s, used_before_s = float(num_streams), 0.0
    while not scheduler.is_over() and used_s - used_before_s >= SPARE_BELOW * num_streams * SPARE_S:
        used_before_s = time.process_time()
        scheduler.pause(SPARE_S)
        used_s = time.process_time()


def _run_stream(reader: _Reader, part: PartFolder, scheduler: ChunkScheduler) -> None:
    """Fetch ranges until there are none: the main function of one thread."""
    source, stream = reader.source, reader.stream
    if reader.spare_after:
        _wait_for_idle_cores(scheduler, reader.spare_after)
    backoff, look_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), LOOK_S
    memory = bytearray()
    try:
        while not scheduler.is_over() and source.problem is None:
            try:
                if source.is_peer and not source.has_all and isinstance(stream, RangeStream):
                    has_changed = scheduler.note_marks(source, stream.read_marks())
                    look_s = LOOK_S if has_changed else min(2 * look_s, LONGEST_LOOK_S)
                while (chunks := scheduler.take(source, look_s)) is not None:
                    memory = _grown(memory, chunks)
                    _fetch_chunks(stream, part, scheduler, chunks, memory)
                    backoff.reset()
            except Absent as exc:
                if not source.is_extra:
                    _lose_origin(source, scheduler, exc)
                scheduler.pause(LOOK_S)
            except (Unusable, Damaged) as exc:
                scheduler.count_failure(source, str(exc))
                scheduler.pause(backoff.next_s())
    except RLBoostError as exc:
        if source.is_peer:
            scheduler.leave_out(source, exc.problem)
        else:
            _lose_origin(source, scheduler, exc)
    except BaseException as exc:  # the other streams must not wait for this one
        scheduler.fail(RuntimeFault(f"a stream failed: {exc!r}", "see the traceback in the log"))
        raise
    finally:
        stream.close()


def _lose_origin(source: SourceState, scheduler: ChunkScheduler, problem: RLBoostError) -> None:
    """Leave an origin out; fail the pull if it was the last one."""
    scheduler.leave_out(source, problem.problem)
    if scheduler.num_origins() == 0:
        scheduler.fail(problem)


def _grown(memory: bytearray, chunks: ChunkRange) -> bytearray:
    """Return memory for the largest piece of the range."""
    size = max(piece.chunk.length for piece in list(chunks.pieces))
    return memory if len(memory) >= size else bytearray(size)


def _fetch_chunks(
    stream: Stream, part: PartFolder, scheduler: ChunkScheduler, chunks: ChunkRange, memory: bytearray
) -> None:
    """Fetch the pieces of a range until they are done, or other streams have taken them over."""
    pieces = list(chunks.pieces)
    file, start = pieces[0].file, pieces[0].chunk.offset
    end = pieces[-1].chunk.offset + pieces[-1].chunk.length
    try:
        with stream.open_range(file.name, start, end, file.size) as fill:
            while (piece := scheduler.next_piece(chunks)) is not None:
                view = memoryview(memory)[: piece.chunk.length]
                for at in range(0, len(view), stream.step_bytes):
                    fill(view[at : at + stream.step_bytes])
                    scheduler.note_bytes(chunks)
                if manifests.digest(view) == piece.chunk.blake3:
                    part.write(piece, view)
                    scheduler.count_verified(chunks, piece)
                else:
                    scheduler.trouble = f"{file.name}: wrong digest at {piece.chunk.offset}"
                    scheduler.count_corrupt(chunks.source, piece)
                    scheduler.skip(chunks)
    except Damaged:
        scheduler.count_corrupt(chunks.source, pieces[0])
        raise
    finally:
        scheduler.end(chunks)


def _stalled(seconds: float, trouble: str) -> RuntimeFault:
    return RuntimeFault(
        f"the pull made no progress for {seconds:g} s (last: {trouble})",
        "check that the head is up and reachable from this machine",
    )
