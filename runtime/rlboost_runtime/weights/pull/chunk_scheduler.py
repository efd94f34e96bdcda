"""What is still to fetch of a version, shared by streams that read from several sources.

A stream takes a *range*: adjacent chunks of one file, fetched by one request. The rules:

- from a peer only chunks that it has; from an origin (head, bucket) any; from an origin that is dearer than
  another only what the cheaper one does not deliver for `PATIENCE_S`;
- where several receivers of a zone pull at once, each takes a different slice of the version from the
  cheapest origin, and the rest from its peers. It takes more from a dearer source only once its slice is here
  and the cheaper ones have been slow for `PATIENCE_S`, or for as long as its slice took: theirs take as long
  over the same link. Sources are slow if they deliver nothing, or if together they have delivered, since the
  slice is here, less than a `SLOW`th of the slice's rate. So an origin sends about one copy per zone, and a
  slow peer delays no receiver for long;
- a stream that finds nothing left to begin takes the second half of another stream's range, or fetches its
  last chunk again if that does not come: a slow source delays no pull. From a cheaper source's range a dearer
  one takes only its slice, unless it may take more than that at all.

Guarantees: a chunk counts once, when it is verified and written; a range given back, whole or in part, is
taken up by others; a peer that sends wrong chunks, or does not answer, is left out. All methods may be called
by any thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.weights.child_pipe import PullProgress
from rlboost_runtime.weights.store.part_folder import Piece

RANGE_BYTES = 32 * 1024 * 1024
"""Most bytes requested at once: large against bandwidth times round trip of one stream."""
RANGES_PER_STREAM = 4
"""What a source sends is cut into at least so many requests per stream, for all streams to end at about the
same time."""
PEER_RANGE_BYTES = 4 * 1024 * 1024
"""Requested at once from a peer, which answers within milliseconds: dividing a range wastes what was under
way already, and of many idle streams there is always one that would divide it."""
MAX_CORRUPT = 3
"""A chunk that came wrong from the head this often is wrong at its origin."""
MAX_EXTRA_CORRUPT = 2
"""A peer or a bucket is left out once so many of its chunks came wrong."""
MAX_PEER_FAILURES = 3
"""A peer is left out after so many failed requests in a row."""
PATIENCE_S, LONGEST_PATIENCE_S = 1.5, 20.0
"""How long cheaper sources may be slow before a dearer one is asked for more than its slice."""
SLOW = 2
"""Healthy peers together deliver at least as much in a second as the slice did."""
STEAL_AFTER_S = 0.3
"""A younger range is not divided: its answer is about to come."""
REPEAT_AFTER_S = 2.0
"""A chunk under way for so long is fetched from another source too; from the same one only if none of its
bytes came for so long: over a slow link a second copy would only take the first one's place."""


@dataclass(eq=False, slots=True)
class SourceState:
    """What a pull knows of one source. `rank`: dearer sources have a higher one."""

    name: str
    is_peer: bool
    rank: int
    is_extra: bool = False
    """Peers and buckets: a version that one of them lacks may still arrive there, and it is left out where
    the head would be asked again."""
    has: bytes | None = None
    """A byte per chunk, 1: it has it; None: it has all."""
    fetched_bytes: int = 0
    late_bytes: int = 0
    """Of these, since our slice is here."""
    num_corrupt: int = 0
    failures_in_row: int = 0
    problem: str | None = None
    """Why it is left out; None: it is not."""
    moved_at: float = field(default_factory=time.monotonic)

    @property
    def has_all(self) -> bool:
        """True if it has every chunk, as far as we know."""
        return self.has is None or (self.has != b"" and b"\0" not in self.has)

    def can_give(self, index: int) -> bool:
        """Return True if it has chunk `index`, as far as we know."""
        return self.has is None or (index < len(self.has) and self.has[index] == 1)


@dataclass(eq=False, slots=True)
class ChunkRange:
    """Adjacent pieces that one stream is fetching; the first of them is the next to come."""

    source: SourceState
    pieces: deque[Piece]
    moved_at: float = field(default_factory=time.monotonic)
    received_at: float = field(default_factory=time.monotonic)
    """When bytes of its next piece last came."""
    repeated: bool = False


class ChunkScheduler:
    """The pieces of one pull that are not here yet."""

    def __init__(
        self,
        pieces: list[Piece],
        progress: PullProgress,
        num_streams: int,
        part: tuple[int, int] | None = (0, 1),
        *,
        are_own: bool = True,
    ) -> None:
        """`part`: (i, n): the i-th of n slices is ours to take from an origin; None: no slice is.

        `are_own`: the pieces are the version's own, not of its deltas.
        """
        start, self._own = _slice(pieces, part)
        total = sum(piece.chunk.length for piece in pieces)
        self._own_bytes = sum(piece.chunk.length for piece in pieces if piece.index in self._own)
        num_ranges = max(1, num_streams * RANGES_PER_STREAM)
        self._limit = min(RANGE_BYTES, total // num_ranges)
        self._own_limit = min(RANGE_BYTES, self._own_bytes // num_ranges)
        self._todo = {piece.index: piece for piece in pieces[start:] + pieces[:start]}
        self._left = set(self._todo)
        self._own_left = set(self._own)
        self._began_at = self._own_done_at = time.monotonic()
        self._ranges: list[ChunkRange] = []
        self.sources: list[SourceState] = []
        self._progress = progress
        self._are_own = are_own
        self._corrupt: dict[int, int] = {}
        self.fetched_bytes = 0
        self.num_corrupt = 0
        self.trouble = "no answer"
        """What went wrong last, for the message when the pull is given up."""
        self.problem: RLBoostError | None = None
        self.moved_at = time.monotonic()
        self.changed = threading.Condition()

    # --- sources ------------------------------------------------------------------------------------------

    def add_source(self, source: SourceState) -> None:
        """Add a source to take from."""
        with self.changed:
            self.sources.append(source)

    def leave_out(self, source: SourceState, problem: str) -> None:
        """Take nothing more from a source."""
        with self.changed:
            source.problem = source.problem or problem
            self.changed.notify_all()

    def note_marks(self, source: SourceState, marks: bytes) -> bool:
        """Note which chunks a peer has; return True if that changed."""
        with self.changed:
            is_news = marks != source.has
            if is_news:
                source.has = marks
                self.changed.notify_all()
            return is_news

    def count_failure(self, source: SourceState, problem: str) -> None:
        """Count a failed request."""
        with self.changed:
            self.trouble = problem
            source.failures_in_row += 1
            if source.is_peer and source.failures_in_row >= MAX_PEER_FAILURES:
                self.leave_out(source, problem)

    def num_origins(self) -> int:
        """Return how many sources other than peers are not left out."""
        with self.changed:
            return sum(not source.is_peer and source.problem is None for source in self.sources)

    # --- ranges -------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Return True if everything is here, or the pull has failed."""
        return not self._left or self.problem is not None

    def take(self, source: SourceState, wait_s: float) -> ChunkRange | None:
        """Return a range for this source; None if there is none within `wait_s`, or the pull is over."""
        with self.changed:
            chunks = self._find(source)
            give_up_at = time.monotonic() + wait_s
            while chunks is None and not self.is_over() and (left := give_up_at - time.monotonic()) > 0:
                self.changed.wait(left)
                chunks = self._find(source)
            if chunks is not None:
                self._ranges.append(chunks)
            return chunks

    def note_bytes(self, chunks: ChunkRange) -> None:
        """Note that some bytes of the range's next piece came."""
        chunks.received_at = time.monotonic()

    def next_piece(self, chunks: ChunkRange) -> Piece | None:
        """Return the piece that the range's stream reads next; None if it has to stop."""
        with self.changed:
            return chunks.pieces[0] if chunks.pieces and not self.is_over() else None

    def count_verified(self, chunks: ChunkRange, piece: Piece) -> None:
        """Count a chunk that is safely written."""
        with self.changed:
            chunks.pieces.popleft()
            length = piece.chunk.length
            chunks.source.fetched_bytes += length
            chunks.source.late_bytes += 0 if self._own_left else length
            chunks.source.failures_in_row = 0
            self.fetched_bytes += length
            now = chunks.moved_at = chunks.source.moved_at = time.monotonic()
            self._progress.moved_bytes += length
            if piece.index in self._left:
                self._left.discard(piece.index)
                if piece.index in self._own_left:
                    self._own_left.discard(piece.index)
                    self._own_done_at = now
                self._todo.pop(piece.index, None)
                self._progress.done_bytes += length if self._are_own else 0
                self.moved_at = now
            self.changed.notify_all()

    def count_corrupt(self, source: SourceState, piece: Piece) -> None:
        """Count a wrong chunk: its source is left out, or the pull fails where that is the head."""
        with self.changed:
            self.num_corrupt += 1
            source.num_corrupt += 1
            where = f"{piece.file.name} bytes {piece.chunk.offset}+{piece.chunk.length}"
            if source.is_extra:
                if source.num_corrupt >= MAX_EXTRA_CORRUPT:
                    self.leave_out(source, f"{where} came wrong")
                return
            times = self._corrupt[piece.index] = self._corrupt.get(piece.index, 0) + 1
            if times >= MAX_CORRUPT:
                self.fail(
                    RuntimeFault(
                        f"{where} came wrong {times} times", "the stored version is damaged: publish again"
                    )
                )

    def skip(self, chunks: ChunkRange) -> None:
        """Let others fetch the range's next piece; its stream goes on with the one after it."""
        with self.changed:
            piece = chunks.pieces.popleft()
            self._give_back(chunks, [piece])

    def end(self, chunks: ChunkRange) -> None:
        """End a range; others take up what it has not delivered."""
        with self.changed:
            if chunks in self._ranges:
                self._ranges.remove(chunks)
                self._give_back(chunks, list(chunks.pieces))
                chunks.pieces.clear()

    def fail(self, problem: RLBoostError) -> None:
        """End the pull; the first problem counts."""
        with self.changed:
            self.problem = self.problem or problem
            self.changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than the pull lasts."""
        with self.changed:
            self.changed.wait_for(self.is_over, seconds)

    # --- who takes what; under the lock -------------------------------------------------------------------

    def _find(self, source: SourceState) -> ChunkRange | None:
        if self.is_over() or source.problem is not None:
            return None
        return self._begin(source) or self._divide(source) or self._repeat(source)

    def _begin(self, source: SourceState) -> ChunkRange | None:
        """Return a range of pieces that no stream is fetching."""
        is_free = self._may_take_all(source)
        own = self._slice_of(source)

        def suits(index: int) -> bool:
            return index in self._todo and source.can_give(index) and (is_free or index in own)

        first = next((piece for index, piece in self._todo.items() if suits(index)), None)
        if first is None:
            return None
        chunks = ChunkRange(source, deque())
        piece: Piece | None = first
        limit = self._limit if is_free else self._own_limit
        if source.is_peer:
            limit = min(PEER_RANGE_BYTES, self._limit)
        size = 0
        while piece is not None and piece.file is first.file and suits(piece.index):
            size += piece.chunk.length
            if chunks.pieces and size > limit:
                break
            chunks.pieces.append(piece)
            del self._todo[piece.index]
            piece = self._todo.get(piece.index + 1)
        return chunks

    def _may_take_all(self, source: SourceState) -> bool:
        """Return True if no cheaper source is worth waiting for."""
        cheaper = self._cheaper(source)
        is_undercut = self._is_undercut(source)
        if not cheaper or (self._own_left and not is_undercut):
            return not cheaper
        own_done_at = self._began_at if is_undercut else self._own_done_at
        patience_s = max(PATIENCE_S, min(LONGEST_PATIENCE_S, own_done_at - self._began_at))
        now = time.monotonic()
        if own_done_at > now - patience_s:
            return False
        deliver_nothing = all(other.moved_at <= now - patience_s for other in cheaper)
        return deliver_nothing or (not is_undercut and self._deliver_little(cheaper, now))

    def _deliver_little(self, cheaper: list[SourceState], now: float) -> bool:
        """Return True if they are slow compared with our slice; False without a slice to compare with."""
        own_s, late_s = self._own_done_at - self._began_at, now - self._own_done_at
        late_bytes = sum(other.late_bytes for other in cheaper)
        return SLOW * late_bytes * own_s < self._own_bytes * late_s

    def _is_undercut(self, source: SourceState) -> bool:
        """Return True if another origin has the same for less: then this one sends no slice."""
        return any(not other.is_peer for other in self._cheaper(source))

    def _slice_of(self, source: SourceState) -> frozenset[int]:
        """Return the pieces that it may send whatever cheaper sources deliver."""
        return frozenset() if self._is_undercut(source) else self._own

    def _cheaper(self, source: SourceState) -> list[SourceState]:
        """Return the sources that cost less and are not left out."""
        return [other for other in self.sources if other.problem is None and other.rank < source.rank]

    def _divide(self, source: SourceState) -> ChunkRange | None:
        """Return the second half of another range."""
        since = time.monotonic() - STEAL_AFTER_S
        others = [
            chunks for chunks in self._rivals(source) if len(chunks.pieces) > 1 and chunks.moved_at < since
        ]
        for victim in sorted(others, key=lambda chunks: -len(chunks.pieces)):
            half = list(victim.pieces)[-(len(victim.pieces) // 2) :]
            if all(source.can_give(piece.index) for piece in half):
                for _ in half:
                    victim.pieces.pop()
                return ChunkRange(source, deque(half))
        return None

    def _repeat(self, source: SourceState) -> ChunkRange | None:
        """Return a piece that another stream has waited for too long."""
        since = time.monotonic() - REPEAT_AFTER_S
        for victim in self._rivals(source):
            if len(victim.pieces) != 1 or victim.moved_at > since or victim.repeated:
                continue
            if victim.source is source and victim.received_at > since:
                continue
            if source.can_give(victim.pieces[0].index):
                victim.repeated = True
                return ChunkRange(source, deque(victim.pieces))
        return None

    def _rivals(self, source: SourceState) -> list[ChunkRange]:
        """Return the ranges that it may take over, whole or in part."""
        is_free, own = self._may_take_all(source), self._slice_of(source)
        return [
            chunks
            for chunks in self._ranges
            if is_free
            or chunks.source.rank >= source.rank
            or all(piece.index in own for piece in chunks.pieces)
        ]

    def _give_back(self, chunks: ChunkRange, pieces: list[Piece]) -> None:
        elsewhere = {p.index for other in self._ranges if other is not chunks for p in other.pieces}
        for piece in pieces:
            if piece.index in self._left and piece.index not in elsewhere:
                self._todo[piece.index] = piece
        self.changed.notify_all()


def _slice(pieces: list[Piece], part: tuple[int, int] | None) -> tuple[int, frozenset[int]]:
    """Return where the i-th of n slices begins, and the indices of the pieces in it."""
    if part is None:
        return 0, frozenset()
    rank, num = part
    start, end = len(pieces) * rank // num, len(pieces) * (rank + 1) // num
    return start, frozenset(piece.index for piece in pieces[start:end])
