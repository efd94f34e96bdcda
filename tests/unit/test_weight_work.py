"""Who takes what of a version that several receivers of a zone pull at once."""

from __future__ import annotations

import pytest

from rlboost_runtime.weights import work as works
from rlboost_runtime.weights.manifest import Chunk, File
from rlboost_runtime.weights.part_folder import Piece
from rlboost_runtime.weights.work import HolderState, Progress, Work

FILE = File("model.safetensors", 4000, tuple(Chunk(at, 1000, "0" * 64) for at in range(0, 4000, 1000)))
PIECES = [Piece(i, FILE, chunk) for i, chunk in enumerate(FILE.chunks)]


def test_where_a_slice_takes_long_peers_get_as_long_before_the_head_is_asked_for_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(works.time, "monotonic", lambda: now)
    work = Work(PIECES, Progress(), 1, (0, 2))
    head = HolderState("head", False, 1, moved_at=now)
    peer = HolderState("peer", True, 0, is_extra=True, has=b"", moved_at=now)
    for holder in (head, peer):
        work.join(holder)
    for _ in range(2):  # our slice, over a slow link: two seconds a chunk
        now += works.PATIENCE_S + 0.5
        run = work.take(head, 0)
        assert run is not None
        for piece in list(run.pieces):
            assert piece.index in (0, 1)
            work.count_verified(run, piece)
        work.end(run)
        if not work._own_left:
            break
    slice_s = work._own_done_at - work._began_at
    now += slice_s - 0.1
    assert work.take(head, 0) is None
    now += 0.2
    assert work.take(head, 0) is not None
