"""When the streams that a pull holds back begin."""

from __future__ import annotations

import itertools
import threading

import pytest

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.weights.child_pipe import PullProgress
from rlboost_runtime.weights.manifest import Chunk, File
from rlboost_runtime.weights.pull import pull as pull_module
from rlboost_runtime.weights.pull.chunk_scheduler import ChunkScheduler
from rlboost_runtime.weights.store.part_folder import Piece

FIRST = 2
LOOKS_S = 0.01


def waiting(
    monkeypatch: pytest.MonkeyPatch, used_per_look_s: float
) -> tuple[ChunkScheduler, threading.Thread]:
    """Return scheduler, and a stream that waits while the others use so much CPU time between two looks."""
    chunk = Chunk(0, 8, "0" * 64)
    scheduler = ChunkScheduler([Piece(0, File("w", 8, (chunk,)), chunk)], PullProgress(), 4)
    clock = itertools.count()
    monkeypatch.setattr(pull_module, "SPARE_S", LOOKS_S)
    monkeypatch.setattr(pull_module.time, "process_time", lambda: next(clock) * used_per_look_s)
    thread = threading.Thread(target=pull_module._wait_for_idle_cores, args=(scheduler, FIRST))
    thread.start()
    return scheduler, thread


def test_it_begins_once_the_others_leave_cores_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, thread = waiting(monkeypatch, 0.2 * FIRST * LOOKS_S)
    thread.join(10)
    assert not thread.is_alive()
    assert not scheduler.is_over()


def test_it_waits_while_the_others_keep_their_cores_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, thread = waiting(monkeypatch, 0.6 * FIRST * LOOKS_S)
    thread.join(20 * LOOKS_S)
    assert thread.is_alive()
    scheduler.fail(RuntimeFault("over", "nothing"))
    thread.join(10)
    assert not thread.is_alive()
