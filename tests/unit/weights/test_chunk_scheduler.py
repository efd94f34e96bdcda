"""Who takes what of a version that several receivers of a zone pull at once."""

from __future__ import annotations

import threading
import time

import pytest

from rlboost_runtime.weights.child_pipe import PullProgress
from rlboost_runtime.weights.manifest import Chunk, File
from rlboost_runtime.weights.pull import chunk_scheduler as scheduling
from rlboost_runtime.weights.pull.chunk_scheduler import ChunkRange, ChunkScheduler, SourceState
from rlboost_runtime.weights.store.part_folder import Piece

FILE = File("model.safetensors", 4000, tuple(Chunk(at, 1000, "0" * 64) for at in range(0, 4000, 1000)))
PIECES = [Piece(i, FILE, chunk) for i, chunk in enumerate(FILE.chunks)]


def test_a_dearer_holder_takes_nothing_over_from_a_peer_that_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now)
    scheduler = ChunkScheduler(PIECES, PullProgress(), 0, (0, 4))
    head = SourceState("head", False, 1, moved_at=now)
    peer, other = (SourceState(name, True, 0, is_extra=True, has=b"\1" * 4, moved_at=now) for name in "ab")
    for source in (head, peer, other):
        scheduler.add_source(source)
    own = scheduler.take(head, 0)
    assert own is not None
    assert [piece.index for piece in own.pieces] == [0]
    theirs = scheduler.take(peer, 0)
    assert theirs is not None
    assert [piece.index for piece in theirs.pieces] == [1, 2, 3]
    own.moved_at = theirs.moved_at = now
    now += scheduling.STEAL_AFTER_S + 0.1
    scheduler.count_verified(own, own.pieces[0])
    scheduler.end(own)
    assert scheduler.take(head, 0) is None  # a slow chunk from a peer is no reason to pay for it
    half = scheduler.take(other, 0)
    assert half is not None
    assert [piece.index for piece in half.pieces] == [3]
    half.moved_at = now
    now += scheduling.PATIENCE_S + 0.1  # nothing comes from either
    again = scheduler.take(head, 0)
    assert again is not None
    assert [piece.index for piece in again.pieces] == [2]


def test_a_slow_chunk_is_not_asked_for_twice_of_the_same_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now)
    scheduler = ChunkScheduler(PIECES[:1], PullProgress(), 1)
    head, peer = SourceState("head", False, 1), SourceState("peer", True, 0, has=b"\1")
    for source in (head, peer):
        scheduler.add_source(source)
    run = scheduler.take(head, 0)
    assert run is not None
    run.moved_at = now
    now += scheduling.REPEAT_AFTER_S + 0.1
    scheduler.note_bytes(run)
    assert scheduler.take(head, 0) is None
    again = scheduler.take(peer, 0)
    assert again is not None
    scheduler.end(again)
    run.repeated = False
    now += scheduling.REPEAT_AFTER_S + 0.1
    assert scheduler.take(head, 0) is not None


def test_where_a_slice_takes_long_peers_get_as_long_before_the_head_is_asked_for_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now)
    scheduler = ChunkScheduler(PIECES, PullProgress(), 1, (0, 2))
    head = SourceState("head", False, 1, moved_at=now)
    peer = SourceState("peer", True, 0, is_extra=True, has=b"", moved_at=now)
    for source in (head, peer):
        scheduler.add_source(source)
    for _ in range(2):  # our slice, over a slow link: two seconds a chunk
        now += scheduling.PATIENCE_S + 0.5
        run = scheduler.take(head, 0)
        assert run is not None
        for piece in list(run.pieces):
            assert piece.index in (0, 1)
            scheduler.count_verified(run, piece)
        scheduler.end(run)
        if not scheduler._own_left:
            break
    slice_s = scheduler._own_done_at - scheduler._began_at
    now += slice_s - 0.1
    assert scheduler.take(head, 0) is None
    now += 0.2
    assert scheduler.take(head, 0) is not None


def from_each(monkeypatch: pytest.MonkeyPatch, peer_s: float, head_s: float) -> tuple[float, int, int]:
    """Fetch 200 chunks, half of them our slice, by one stream each from a peer that has all and the head,
    that take so long for a chunk; return the seconds, and how many came from the peer and the head."""
    now = 100.0
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now)
    size, num = scheduling.PEER_RANGE_BYTES, 200
    file = File("model.safetensors", num * size, tuple(Chunk(size * i, size, "0" * 64) for i in range(num)))
    scheduler = ChunkScheduler(
        [Piece(i, file, chunk) for i, chunk in enumerate(file.chunks)], PullProgress(), 4, (0, 2)
    )
    peer = SourceState("peer", True, 0, is_extra=True, has=b"\1" * num, moved_at=now)
    head = SourceState("head", False, 1, moved_at=now)
    runs: dict[str, tuple[ChunkRange, float]] = {}  # each with when its next chunk is there
    for source in (peer, head):
        scheduler.add_source(source)
    while not scheduler.is_over() and now < 1000:
        for source, chunk_s in ((peer, peer_s), (head, head_s)):
            run, due = runs.pop(source.name, (None, 0.0))
            if run is not None and now >= due:
                piece = scheduler.next_piece(run)
                if piece is not None:
                    scheduler.count_verified(run, piece)
                due = now + chunk_s
            if run is not None and not run.pieces:
                scheduler.end(run)
                run = None
            if run is None:
                run, due = scheduler.take(source, 0), now + chunk_s
                if run is not None:
                    run.moved_at = run.received_at = now
            if run is not None:
                runs[source.name] = (run, due)
        now += 0.01
    return now - 100, peer.fetched_bytes // size, head.fetched_bytes // size


def test_a_peer_that_is_slow_but_steady_does_not_hold_up_the_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone_s = 200 * 0.04
    for peer_s in (0.4, 1.4, 3.0, 1e9):
        seconds, _, _ = from_each(monkeypatch, peer_s=peer_s, head_s=0.04)
        assert seconds < 2.5 * alone_s


def test_a_peer_that_is_about_as_fast_as_the_head_spares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer_s in (0.04, 0.06):
        _, from_peer, from_head = from_each(monkeypatch, peer_s=peer_s, head_s=0.04)
        assert from_head <= 100
        assert from_peer >= 100


def test_the_head_is_asked_only_for_what_a_cheaper_bucket_does_not_bring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now)
    scheduler = ChunkScheduler(PIECES, PullProgress(), 1)
    head = SourceState("head", False, 2, moved_at=now)
    bucket = SourceState("bucket", False, 1, is_extra=True, moved_at=now)
    for source in (head, bucket):
        scheduler.add_source(source)
    first = scheduler.take(bucket, 0)
    assert first is not None
    assert scheduler.take(head, 0) is None
    now += scheduling.PATIENCE_S + 0.1  # the bucket brings nothing
    for _ in range(2):  # and the head, once asked, is not asked to wait again
        run = scheduler.take(head, 0)
        assert run is not None
        scheduler.count_verified(run, run.pieces[0])
        scheduler.end(run)
    scheduler.count_verified(first, first.pieces[0])  # it comes after all
    scheduler.end(first)
    assert scheduler.take(head, 0) is None
    assert scheduler.take(bucket, 0) is not None


def test_an_origin_of_the_same_price_is_read_from_as_well() -> None:
    scheduler = ChunkScheduler(PIECES, PullProgress(), 1)
    origins = [SourceState(name, False, 1, is_extra=name == "bucket") for name in ("head", "bucket")]
    for source in origins:
        scheduler.add_source(source)
    assert all(scheduler.take(source, 0) is not None for source in origins)


def test_a_slice_is_asked_for_in_as_many_requests_as_a_whole_version() -> None:
    num = 64
    file = File("model.safetensors", num * 1000, tuple(Chunk(1000 * i, 1000, "0" * 64) for i in range(num)))
    pieces = [Piece(i, file, chunk) for i, chunk in enumerate(file.chunks)]
    scheduler = ChunkScheduler(pieces, PullProgress(), 2, (1, 4))
    head = SourceState("head", False, 1)
    peer = SourceState("peer", True, 0, is_extra=True, has=b"\1" * num)
    for source in (head, peer):
        scheduler.add_source(source)
    run = scheduler.take(head, 0)
    assert run is not None
    assert [piece.index for piece in run.pieces] == [16, 17]  # of 16 chunks for two streams
    alone = ChunkScheduler(pieces, PullProgress(), 2)
    alone.add_source(head)
    run = alone.take(head, 0)
    assert run is not None
    assert len(run.pieces) == 8


def test_little_is_asked_for_at_once_of_a_peer() -> None:
    size = scheduling.PEER_RANGE_BYTES
    file = File("model.safetensors", 64 * size, tuple(Chunk(size * i, size, "0" * 64) for i in range(64)))
    pieces = [Piece(i, file, chunk) for i, chunk in enumerate(file.chunks)]
    scheduler = ChunkScheduler(pieces, PullProgress(), 2)
    for source in (
        SourceState("head", False, 0),
        SourceState("peer", True, 0, is_extra=True, has=b"\1" * 64),
    ):
        scheduler.add_source(source)
        run = scheduler.take(source, 0)
        assert run is not None
        assert len(run.pieces) == (1 if source.is_peer else 8)


def test_a_stream_waits_on_through_what_does_not_help_it() -> None:
    scheduler = ChunkScheduler(PIECES, PullProgress(), 1)
    head = SourceState("head", False, 1)
    peer = SourceState("peer", True, 0, is_extra=True, has=b"\0" * 4)
    for source in (head, peer):
        scheduler.add_source(source)
    assert scheduler.note_marks(head, b"\1\1\1\1")
    assert not scheduler.note_marks(head, b"\1\1\1\1")
    taken: list[float] = []

    def wait() -> None:
        began = time.monotonic()
        assert scheduler.take(peer, 0.3) is None
        taken.append(time.monotonic() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(4):
        time.sleep(0.02)
        scheduler.note_marks(head, b"\1\0\1\1")
        scheduler.note_marks(head, b"\1\1\1\1")
    thread.join()
    assert taken[0] >= 0.3


def test_a_stream_that_waits_hears_at_once_of_what_its_peer_has() -> None:
    scheduler = ChunkScheduler(PIECES, PullProgress(), 1)
    peer = SourceState("peer", True, 0, is_extra=True, has=b"\0" * 4)
    scheduler.add_source(peer)
    timer = threading.Timer(0.02, scheduler.note_marks, (peer, b"\0\0\1\0"))
    timer.start()
    run = scheduler.take(peer, 30.0)
    timer.join()
    assert run is not None
    assert [piece.index for piece in run.pieces] == [2]
