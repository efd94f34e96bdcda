"""Fetch a weight version: whole or by deltas, over several streams, from anybody who has it.

In order: a version that is here already is verified and kept; one that lies in a store on this machine, or
that another engine of this machine has fetched, is linked, not copied; else deltas are fetched and applied
where that costs less and there is a base for them; what is then still missing is fetched whole, chunk by
chunk (`weights.work`).

Guarantees: a chunk counts only once its digest is the manifest's, wherever it came from and however it was
made, so a wrong base, a damaged delta or a lying holder can cost time but never give wrong weights; whatever
may pass is tried again, with a pause, as long as the pull as a whole makes progress; what was verified before
a failure is kept for the next attempt (`part_folder`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlboost_runtime.errors import ProtocolError, RLBoostError, RuntimeFault
from rlboost_runtime.seams import Backoff
from rlboost_runtime.weights import manifest as manifests
from rlboost_runtime.weights.manifest import MANIFEST, Delta, Manifest
from rlboost_runtime.weights.pull.chunk_scheduler import ChunkRange, ChunkScheduler, HolderState, PullProgress
from rlboost_runtime.weights.pull.range_client import Absent, Damaged, RangeStream, Unusable
from rlboost_runtime.weights.pull.restore import link_sibling, link_version, turn
from rlboost_runtime.weights.pull.sources import (
    DEFAULT_BYTES_PER_S,
    Holder,
    Kind,
    LinkCost,
    Stream,
    TransferSettings,
    VersionSource,
    num_deltas,
    open_source,
)
from rlboost_runtime.weights.store.part_folder import PartFolder, Piece, complete_version, part_folder, prune

IDLE_S = 10.0
"""A connection on which no byte arrives for this long is given up."""
PROGRESS_S = 60.0
"""A pull in which no chunk was verified for this long is given up: 4 MiB in 60 s is 0.6 Mbit/s."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pause after a failed request, doubled from one to the next; drawn between half of it and all of it."""
LOOK_S, LONGEST_LOOK_S = 0.2, 1.0
"""How often a stream with nothing to do asks its peer what that has by now: half as often as long as that is
nothing new, as seven peers of eight receivers that do so cost half a core."""
LEAST_STREAMS = 2
"""One of them waits for an answer while the other one works."""
SPARE_S = 0.5
"""How often it is looked whether the streams at work leave cores idle, so that more of them could help."""
SPARE_BELOW = 1 / 3
"""Such a share of a core and less of each stream is idling: where the head shares the cores, it is 0.6."""
MAX_MANIFEST_BYTES = 256 * 1024 * 1024


class PullRequest(msgspec.Struct, frozen=True):
    """What to fetch. `url`: the weight server, such as https://10.0.0.1:8443; `folder`: where versions lie
    here; `certificate`: PEM text; `keep`: how many versions stay in the folder.

    `holders`: who else may have it; `part`: (i, n), which slice of it to take from the head where n instances
    of a zone pull at once, (0, 0): none; `digest`: the version's content digest where it is known; `store`:
    the head's store where it lies on this machine; `siblings`: the folders of this machine's other engines;
    `receiver`: who pulls, to servers that give shares; the rest is for `choice.Link`. `serves`: whether an
    engine here serves an older version meanwhile.

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
    holders: tuple[Holder, ...] = ()
    part: tuple[int, int] = (0, 1)
    digest: str = ""
    store: str = ""
    siblings: tuple[str, ...] = ()
    transfer: TransferSettings = TransferSettings.AUTO
    usd_per_gb: float = 0.0
    usd_per_hour: float = 0.0
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    serves: bool = False
    receiver: str = ""

    @property
    def all_holders(self) -> tuple[Holder, ...]:
        """The head, then everybody else."""
        head = Holder("head", Kind.HEAD, self.url, self.certificate, self.usd_per_gb)
        return (head, *self.holders)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds; see `IDLE_S` and `PROGRESS_S`."""

    idle_s: float = IDLE_S
    progress_s: float = PROGRESS_S


@dataclass(slots=True)
class Pulled:
    """A version that lies complete in `folder`. `pulled_bytes`: fetched by this pull, not by a former one."""

    folder: Path
    pulled_bytes: int = 0
    num_corrupt: int = 0
    """Chunks that came with a wrong digest and were fetched again."""
    how: str = "here"
    """here: nothing was fetched; linked: from a store on this machine; full; delta; part: a large file was
    that of a version that is here."""
    full_bytes: int = 0
    restored_bytes: int = 0
    """Made of a base that was here."""
    fetch_s: float = 0.0
    """Seconds in which bytes were fetched."""
    by_holder: dict[str, int] = field(default_factory=dict)
    complaints: dict[str, str] = field(default_factory=dict)
    """Holders that were left out, and why."""


def pull(request: PullRequest, progress: PullProgress, deadlines: Deadlines | None = None) -> Pulled:
    """Fetch a version and delete old ones; blocks. Raises `ProtocolError` and `RuntimeFault`.

    A version that is here already is verified, not fetched again.
    """
    deadlines = deadlines or Deadlines()
    if request.streams < 1 or request.keep < 1:
        raise ProtocolError(f"streams {request.streams}, keep {request.keep}", "both must be at least 1")
    folder = Path(request.folder)
    with turn(folder.parent, progress) if request.siblings else nullcontext():
        linked = _link(request, folder)
        if linked is not None:
            prune(folder, request.version, request.keep)
            return Pulled(linked, how="linked", full_bytes=manifests.read_manifest(linked).num_bytes)
        return _Pull(request, progress, deadlines).run(folder)


def _link(request: PullRequest, folder: Path) -> Path | None:
    """Return the version, linked from wherever it lies on this machine; None: nowhere."""
    siblings = [Path(each) for each in request.siblings]
    found = link_version(Path(request.store), request.version, folder, request.digest)
    return found or link_sibling(siblings, request.version, folder, request.digest)


class _Pull:
    """One pull over the network."""

    def __init__(self, request: PullRequest, progress: PullProgress, deadlines: Deadlines) -> None:
        self._request = request
        self._progress = progress
        self._deadlines = deadlines
        self._sources: list[tuple[Holder, VersionSource]] = []
        self._complaints: dict[str, str] = {}
        for holder in request.all_holders:
            try:
                source = open_source(
                    holder, request.version, request.token, deadlines.idle_s, request.receiver
                )
            except ProtocolError as exc:
                if holder.kind is not Kind.PEER:
                    raise
                self._complaints[holder.name] = exc.problem  # its own word was passed on as it was
            else:
                self._sources.append((holder, source))
        prices = sorted({holder.usd_per_gb for holder, _ in self._sources})
        self._ranks = {price: i + 1 for i, price in enumerate(prices)}

    def run(self, folder: Path) -> Pulled:
        """Do it."""
        request = self._request
        manifest = self._fetch_manifest()
        self._progress.total_bytes = manifest.num_bytes
        with part_folder(folder, manifest, self._progress.verified) as part:
            path = complete_version(folder, manifest, self._progress.verified)
            pulled = Pulled(path or folder, full_bytes=manifest.num_bytes, complaints=self._complaints)
            if path is None:
                missing = part.prepare(_versions(folder))
                pulled.how = "part" if part.linked_bytes else "full"
                chain = self._choose(folder, manifest, missing)
                if chain is not None:
                    missing = self._restore(part, manifest, chain, missing, pulled)
                self._fetch(part, missing, pulled)
                pulled.folder = part.finish()
        self._progress.done_bytes = manifest.num_bytes
        prune(folder, request.version, request.keep)
        return pulled

    # --- deltas -------------------------------------------------------------------------------------------

    def _choose(self, folder: Path, manifest: Manifest, missing: list[Piece]) -> _Chain | None:
        """Return the deltas to fetch and the base for them; None: the version whole."""
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
        return None if base is None else _Chain(manifest.deltas[:num], base / target)

    def _restore(
        self, part: PartFolder, manifest: Manifest, chain: _Chain, missing: list[Piece], pulled: Pulled
    ) -> list[Piece]:
        """Fetch the deltas, apply them, return what is still missing."""
        from rlboost_runtime.weights.pull.restore import restore  # numba: a second to import

        try:
            self._fetch(part, part.prepare_deltas(chain.deltas), pulled, are_own=False)
        except RuntimeFault as exc:
            pulled.complaints["delta"] = exc.problem
            return missing
        target = [piece for piece in missing if piece.file.name == chain.deltas[0].target]
        paths = [part.file(delta.file.name) for delta in reversed(chain.deltas)]
        pulled.restored_bytes = restore(part, chain.base, paths, target, self._progress)
        pulled.how = "delta" if pulled.restored_bytes else "full"
        wrong = sum(piece.chunk.length for piece in target) - pulled.restored_bytes
        if wrong:
            pulled.complaints["delta"] = f"{wrong} bytes did not come out right and are fetched whole"
        return part.missing()

    # --- bytes --------------------------------------------------------------------------------------------

    def _fetch(self, part: PartFolder, missing: list[Piece], pulled: Pulled, *, are_own: bool = True) -> None:
        if not missing:
            return
        started = time.monotonic()
        request = self._request
        size = sum(piece.chunk.length for piece in missing)
        if are_own:
            self._progress.done_bytes = self._progress.total_bytes - size
        has_peers = any(holder.kind is Kind.PEER for holder, _ in self._sources)
        rank, num = request.part if has_peers else (0, 1)
        work = ChunkScheduler(
            missing, self._progress, request.streams, (rank, num) if num else None, are_own=are_own
        )
        streams = list(self._streams(work, size))
        with ThreadPoolExecutor(len(streams), thread_name_prefix="stream") as pool:
            futures = [pool.submit(_run_stream, each, part, work) for each in streams]
            try:
                _watch(work, self._deadlines.progress_s)
            finally:
                for each in streams:
                    each.stream.abort()
        for future in futures:
            future.result()
        _note(pulled, work, [each.holder for each in streams])
        pulled.fetch_s += time.monotonic() - started
        if work.problem is not None:
            raise work.problem

    def _streams(self, work: ChunkScheduler, size: int) -> Iterator[_Reader]:
        """Yield the streams to read with: one per peer, several for each of the others."""
        num_first = max(LEAST_STREAMS, _num_cores())
        for holder, source in self._sources:
            is_peer = holder.kind is Kind.PEER
            rank = 0 if is_peer else self._ranks[holder.usd_per_gb]
            state = HolderState(
                holder.name,
                is_peer,
                rank,
                is_extra=holder.kind is not Kind.HEAD,
                has=b"" if is_peer else None,
            )
            work.join(state)
            if not self._request.serves:
                source.left_bytes = size
            for i in range(1 if is_peer else self._request.streams):
                yield _Reader(state, source.stream(), spare_after=num_first if i >= num_first else 0)

    def _fetch_manifest(self) -> Manifest:
        """Fetch the manifest from the head, or from a bucket where the head does not answer."""
        origins = [(h, s) for h, s in self._sources if h.kind is Kind.HEAD or self._is_vouched_for(h)]
        give_up_at = time.monotonic() + self._deadlines.progress_s
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            for holder, source in origins:
                try:
                    return self._read_manifest(holder, source)
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

    def _is_vouched_for(self, holder: Holder) -> bool:
        """Whether we would notice if it gave us another manifest."""
        return holder.kind is Kind.BUCKET and self._request.digest != ""

    def _read_manifest(self, holder: Holder, source: VersionSource) -> Manifest:
        stream = source.stream()
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
            problem = f"{holder.name} has version {request.version} with other content than was announced"
            if holder.kind is Kind.HEAD:
                raise ProtocolError(problem, "publish the weights under a new number")
            raise Unusable(problem)
        return manifest


@dataclass(frozen=True, slots=True)
class _Reader:
    """A stream and its holder. `spare_after`: it begins once so many leave cores idle; 0: at once."""

    holder: HolderState
    stream: Stream
    spare_after: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """Deltas, the newest first, and the file that the last of them starts from."""

    deltas: tuple[Delta, ...]
    base: Path


def _versions(folder: Path) -> list[Path]:
    """Return the versions that are here, the newest first."""
    found = [path for path in folder.iterdir() if manifests.parse_version_name(path.name) is not None]
    return sorted(found, reverse=True)


def _base(folder: Path, delta: Delta) -> Path | None:
    """Return the folder of the very version that the delta starts from, where it is here."""
    path = folder / manifests.version_name(delta.base)
    try:
        found = manifests.read_manifest(path)
    except ProtocolError:
        return None
    return path if found.content_digest == delta.base_digest else None


def _note(pulled: Pulled, work: ChunkScheduler, states: Sequence[HolderState]) -> None:
    pulled.pulled_bytes += work.fetched_bytes
    pulled.num_corrupt += work.num_corrupt
    for state in dict.fromkeys(states):
        if state.fetched_bytes:
            pulled.by_holder[state.name] = pulled.by_holder.get(state.name, 0) + state.fetched_bytes
        if state.problem is not None:
            pulled.complaints[state.name] = state.problem


def _watch(work: ChunkScheduler, progress_s: float) -> None:
    """Wait for the end of the work, and end it where it stands still."""
    with work.changed:
        while not work.is_over():
            left = work.moved_at + progress_s - time.monotonic()
            if left <= 0:
                work.fail(_stalled(progress_s, work.trouble))
            work.changed.wait(max(0.0, left))
        work.changed.notify_all()


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait_for_idle_cores(work: ChunkScheduler, num_streams: int) -> None:
    """Wait until so many streams use less than `SPARE_BELOW` of a core each, or the work is over."""
    used_s, used_before_s = float(num_streams), 0.0
    while not work.is_over() and used_s - used_before_s >= SPARE_BELOW * num_streams * SPARE_S:
        used_before_s = time.process_time()
        work.pause(SPARE_S)
        used_s = time.process_time()


def _run_stream(reader: _Reader, part: PartFolder, work: ChunkScheduler) -> None:
    """Fetch runs until there are none: the life of one thread."""
    holder, stream = reader.holder, reader.stream
    if reader.spare_after:
        _wait_for_idle_cores(work, reader.spare_after)
    backoff, look_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), LOOK_S
    memory = bytearray()
    try:
        while not work.is_over() and holder.problem is None:
            try:
                if holder.is_peer and not holder.has_all and isinstance(stream, RangeStream):
                    is_news = work.learn(holder, stream.read_marks())
                    look_s = LOOK_S if is_news else min(2 * look_s, LONGEST_LOOK_S)
                while (run := work.take(holder, look_s)) is not None:
                    memory = _grown(memory, run)
                    _fetch_run(stream, part, work, run, memory)
                    backoff.reset()
            except Absent as exc:
                if not holder.is_extra:
                    _lose_origin(holder, work, exc)
                work.pause(LOOK_S)
            except (Unusable, Damaged) as exc:
                work.count_failure(holder, str(exc))
                work.pause(backoff.next_s())
    except RLBoostError as exc:
        if holder.is_peer:
            work.leave_out(holder, exc.problem)
        else:
            _lose_origin(holder, work, exc)
    except BaseException as exc:  # the other streams must not wait for this one
        work.fail(RuntimeFault(f"a stream failed: {exc!r}", "see the traceback in the log"))
        raise
    finally:
        stream.close()


def _lose_origin(holder: HolderState, work: ChunkScheduler, problem: RLBoostError) -> None:
    """Go on without an origin, as long as there is another one."""
    work.leave_out(holder, problem.problem)
    if work.num_origins() == 0:
        work.fail(problem)


def _grown(memory: bytearray, run: ChunkRange) -> bytearray:
    """Return memory for the largest piece of the run."""
    size = max(piece.chunk.length for piece in list(run.pieces))
    return memory if len(memory) >= size else bytearray(size)


def _fetch_run(
    stream: Stream, part: PartFolder, work: ChunkScheduler, run: ChunkRange, memory: bytearray
) -> None:
    """Fetch a run's pieces until they are done, or others have taken them over."""
    pieces = list(run.pieces)
    file, start = pieces[0].file, pieces[0].chunk.offset
    end = pieces[-1].chunk.offset + pieces[-1].chunk.length
    try:
        with stream.open_range(file.name, start, end, file.size) as fill:
            while (piece := work.next_piece(run)) is not None:
                view = memoryview(memory)[: piece.chunk.length]
                for at in range(0, len(view), stream.step_bytes):
                    fill(view[at : at + stream.step_bytes])
                    work.heard(run)
                if manifests.digest(view) == piece.chunk.blake3:
                    part.write(piece, view)
                    work.count_verified(run, piece)
                else:
                    work.trouble = f"{file.name}: wrong digest at {piece.chunk.offset}"
                    work.count_corrupt(run.holder, piece)
                    work.skip(run)
    except Damaged:
        work.count_corrupt(run.holder, pieces[0])
        raise
    finally:
        work.end(run)


def _stalled(seconds: float, trouble: str) -> RuntimeFault:
    return RuntimeFault(
        f"the pull made no progress for {seconds:g} s (last: {trouble})",
        "check that the head is up and reachable from this machine",
    )
