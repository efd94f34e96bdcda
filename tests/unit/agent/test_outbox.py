"""What an agent owes the coordinator."""

from __future__ import annotations

import numpy as np

from rlboost_runtime.agent.outbox import Outbox
from rlboost_runtime.core.base.messages import ReleaseReason
from rlboost_runtime.engines.base import EngineOutput
from rlboost_runtime.protocol.messages import AssignmentEnd


def output(
    request_id: int, token_ids: list[int], version: int = 0, finished: str | None = None
) -> EngineOutput:
    """Return an output of one request; the logprob of its k-th token is -k / 2."""
    made = EngineOutput(version)
    made.add(request_id, token_ids, [-k / 2 for k in range(len(token_ids))])
    if finished:
        made.end(request_id, finished)
    return made


def test_a_frame_holds_one_version_and_order_is_kept():
    outbox = Outbox()
    outbox.begin(7, 3, 0)
    outbox.begin(8, 0, 0)
    step = EngineOutput(0)
    step.add(7, [1], [-0.5])
    step.add(8, [2, 3], [-1.0, -2.0])
    step.add(7, [4], [-3.0])
    outbox.add(step)
    outbox.add(output(7, [5], 1, "stop"))
    first, second = outbox.cut()
    assert (first.seq, first.policy_version, second.seq, second.policy_version) == (0, 0, 1, 1)
    assert np.frombuffer(first.assignments, "<u4").tolist() == [7, 8]
    assert np.frombuffer(first.offsets, "<u4").tolist() == [3, 0]
    assert np.frombuffer(first.counts, "<u2").tolist() == [2, 2]
    assert np.frombuffer(first.token_ids, "<i4").tolist() == [1, 4, 2, 3]
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [-0.5, -3.0, -1.0, -2.0]
    assert np.frombuffer(second.offsets, "<u4").tolist() == [5]
    assert second.endings == (AssignmentEnd(7, "stop"),)


def test_frames_stay_until_acknowledged_and_are_resent_in_order():
    outbox = Outbox()
    outbox.begin(1, 0, 0)
    for token in range(3):
        outbox.add(output(1, [token]))
        outbox.cut()
    outbox.ack(0)
    assert [frame.seq for frame in outbox.unacked()] == [1, 2]
    outbox.ack(-1)
    assert [frame.seq for frame in outbox.unacked()] == [1, 2]
    outbox.ack(2)
    assert outbox.is_clear


def test_nothing_is_cut_when_nothing_is_owed():
    outbox = Outbox()
    outbox.begin(1, 0, 0)
    assert outbox.cut() == []
    assert outbox.is_clear


def test_an_ended_assignment_is_held_until_its_ending_is_acknowledged():
    outbox = Outbox()
    outbox.begin(1, 0, 0)
    outbox.end(1, ReleaseReason.ENGINE_FAILED, "it died")
    assert (outbox.open, outbox.held) == ((), (1,))
    (frame,) = outbox.cut()
    assert frame.endings == (AssignmentEnd(1, "engine_failed", "it died"),)
    assert outbox.held == (1,)
    outbox.ack(frame.seq)
    assert outbox.held == ()


def test_words_after_the_end_are_dropped():
    outbox = Outbox()
    outbox.begin(1, 0, 0)
    outbox.add(output(1, [1], 0, "stop"))
    outbox.add(output(1, [2], 0, "stop"))
    outbox.end(1, ReleaseReason.ENGINE_FAILED)
    (frame,) = outbox.cut()
    assert np.frombuffer(frame.token_ids, "<i4").tolist() == [1]
    assert len(frame.endings) == 1


def test_it_is_full_until_enough_is_acknowledged():
    outbox = Outbox(max_tokens=3)
    outbox.begin(1, 0, 0)
    outbox.add(output(1, [1, 2]))
    assert not outbox.is_full
    (first,) = outbox.cut()
    outbox.add(output(1, [3]))
    assert outbox.is_full
    outbox.ack(first.seq)
    assert not outbox.is_full


def test_void_forgets_everything_but_the_numbering():
    outbox = Outbox()
    outbox.begin(1, 0, 0)
    outbox.add(output(1, [1]))
    outbox.cut()
    outbox.void()
    assert outbox.is_clear
    assert outbox.held == ()
    outbox.add(output(1, [2]))  # the engine has not heard yet
    assert outbox.cut() == []
    outbox.begin(1, 0, 0)
    outbox.add(output(1, [3]))
    assert [frame.seq for frame in outbox.cut()] == [1]


def test_a_delta_longer_than_a_count_can_say_goes_into_frames_of_its_own():
    outbox = Outbox()
    outbox.begin(1, 10, 0)
    outbox.begin(2, 0, 0)
    outbox.add(output(2, [1]))
    outbox.add(output(1, [0] * 70_000))
    outbox.add(output(2, [2], 0, "stop"))
    outbox.add(output(1, [0] * 61_075))
    frames = outbox.cut()
    assert [np.frombuffer(f.assignments, "<u4").tolist() for f in frames] == [[2, 1], [1, 2], [1]]
    assert [np.frombuffer(f.counts, "<u2").tolist() for f in frames] == [[1, 65_535], [65_535, 1], [5]]
    assert [np.frombuffer(f.offsets, "<u4").tolist() for f in frames] == [[0, 10], [65_545, 1], [131_080]]
