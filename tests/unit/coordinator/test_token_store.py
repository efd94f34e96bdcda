"""The rules of accepting tokens, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from rlboost_runtime.coordinator.storage.token_store import TokenStore
from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol import messages as wire

STOP = 7


def make_store(num_responses: int = 4, max_tokens: int = 10, first: int = 100) -> TokenStore:
    store = TokenStore()
    store.open_step(3, range(first, first + num_responses), [max_tokens] * num_responses, (STOP,))
    return store


def make_frame(
    *deltas: tuple[int, int, list[int]], endings: tuple[wire.AssignmentEnd, ...] = (), version: int = 5
) -> wire.Frame:
    """A frame of (assignment, offset, token ids); a token's logprob is minus its id / 10."""
    ids = [token for _, _, tokens in deltas for token in tokens]
    return wire.Frame(
        seq=0,
        policy_version=version,
        assignments=np.array([a for a, _, _ in deltas], "<u4").tobytes(),
        offsets=np.array([o for _, o, _ in deltas], "<u4").tobytes(),
        counts=np.array([len(t) for _, _, t in deltas], "<u2").tobytes(),
        token_ids=np.array(ids, "<i4").tobytes(),
        logprobs=(-np.array(ids, "<f4") / 10).tobytes(),
        endings=endings,
    )


def ids(store: TokenStore, response: int) -> list[int]:
    return np.frombuffer(store.token_ids(response), "<i4").tolist()


def counts(accepted) -> tuple[int, int, int]:
    return accepted.num_accepted, accepted.num_dropped, accepted.num_duplicate


def segments(store: TokenStore, response: int) -> list[tuple[str, int, int]]:
    return [(s.instance, s.policy_version, s.num_tokens) for s in store.segments(response)]


def test_tokens_of_a_frame_land_in_their_responses():
    store = make_store()
    assert store.assign(11, 100, "i-a") == 0
    assert store.assign(12, 103, "i-a") == 0
    assert counts(store.accept(make_frame((12, 0, [1, 2, 3]), (11, 0, [4])))) == (4, 0, 0)
    assert counts(store.accept(make_frame((11, 1, [5, 6]), (12, 3, [9])))) == (3, 0, 0)
    assert ids(store, 103) == [1, 2, 3, 9]
    assert ids(store, 100) == [4, 5, 6]
    assert ids(store, 101) == []
    logprobs = np.frombuffer(store.logprobs(103), "<f4")
    np.testing.assert_allclose(logprobs, [-0.1, -0.2, -0.3, -0.9], rtol=1e-6)
    assert segments(store, 103) == [("i-a", 5, 4)]
    assert store.segments(101) == ()
    store.check()


def test_an_unknown_assignment_is_dropped_and_counted():
    store = make_store()
    store.assign(11, 100, "i-a")
    accepted = store.accept(make_frame((11, 0, [1]), (10, 0, [2, 3]), (4_000_000_000, 0, [4])))
    assert counts(accepted) == (1, 3, 0)
    assert store.accept(make_frame((0, 0, [2]))).record is None


@pytest.mark.parametrize("offset", [0, 1, 2**32 - 1, 2**32 - 2])
def test_no_offset_lets_an_unknown_assignment_in(offset):
    store = make_store()
    store.assign(11, 100, "i-a")
    accepted = store.accept(make_frame((12, offset, [2, 3])))
    assert (counts(accepted), accepted.record) == ((0, 2, 0), None)
    assert counts(store.accept(make_frame((11, 2**32 - 1, [2, 3])))) == (0, 2, 0)
    store.check()


def test_no_assignment_at_all_drops_everything():
    store = make_store(num_responses=0)
    assert counts(store.accept(make_frame((0, 0, [2, 3])))) == (0, 2, 0)


def test_a_new_assignment_makes_the_former_stale():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1, 2])))
    assert store.assign(12, 100, "i-b") == 2
    late = make_frame((11, 2, [8, 8]), endings=(wire.AssignmentEnd(11, "stop"),))
    accepted = store.accept(late)
    assert counts(accepted) == (0, 2, 0)
    assert accepted.endings == ()
    store.accept(make_frame((12, 2, [3])))
    assert ids(store, 100) == [1, 2, 3]
    assert segments(store, 100) == [("i-a", 5, 2), ("i-b", 5, 1)]


def test_another_instances_assignment_is_foreign_and_a_stale_one_is_not():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.assign(12, 101, "i-b")
    assert not store.is_foreign(make_frame((11, 0, [1]), (99, 0, [1])), "i-a")
    assert store.is_foreign(make_frame((11, 0, [1]), (12, 0, [1])), "i-a")
    assert store.is_foreign(make_frame(endings=(wire.AssignmentEnd(12, "stop"),)), "i-a")
    assert store.is_foreign(make_frame((11, 0, [1])), "never seen")
    store.assign(13, 100, "i-b")
    assert not store.is_foreign(make_frame((11, 0, [1])), "i-a")


def test_nothing_is_accepted_after_unassign():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.unassign(11)
    store.unassign(11)
    assert counts(store.accept(make_frame((11, 0, [1])))) == (0, 1, 0)
    assert store.assign(11, 100, "i-a") == 0
    assert counts(store.accept(make_frame((11, 0, [1])))) == (1, 0, 0)


def test_of_a_resend_only_the_new_tail_is_accepted():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1, 2, 3])))
    assert counts(store.accept(make_frame((11, 0, [1, 2, 3])))) == (0, 0, 3)
    assert counts(store.accept(make_frame((11, 1, [99, 99, 4, 5])))) == (2, 0, 2)
    assert ids(store, 100) == [1, 2, 3, 4, 5]


def test_a_gap_is_never_filled_with_a_hole():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.assign(12, 101, "i-a")
    assert counts(store.accept(make_frame((11, 1, [2, 3]), (12, 0, [5])))) == (1, 2, 0)
    assert (ids(store, 100), ids(store, 101)) == ([], [5])


def test_a_finish_behind_a_gap_is_not_believed():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1])))
    store.accept(make_frame((11, 2, [3])))
    (ending,) = store.accept(make_frame(endings=(wire.AssignmentEnd(11, "stop"),))).endings
    assert (ending.reason, ending.num_tokens) == ("engine_failed", 1)
    assert "2 tokens from 1 on never arrived" in ending.problem
    assert store.is_complete(100) is None
    assert store.assign(12, 100, "i-b") == 1


def test_a_finish_is_believed_once_the_gap_is_filled():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 1, [2])))
    end = make_frame((11, 0, [1, 2]), endings=(wire.AssignmentEnd(11, "stop"),))
    (ending,) = store.accept(end).endings
    assert (ending.reason, ending.num_tokens) == ("stop", 2)


def test_tokens_beyond_the_limit_are_dropped_and_the_response_is_full_once():
    store = make_store(max_tokens=4)
    store.assign(11, 100, "i-a")
    accepted = store.accept(make_frame((11, 0, [1, 2, 3, 4, 5, 6])))
    assert counts(accepted) == (4, 2, 0)
    assert accepted.full == (100,)
    assert store.is_complete(100) is FinishReason.LENGTH
    again = store.accept(make_frame((11, 6, [5]), endings=(wire.AssignmentEnd(11, "length"),)))
    assert (counts(again), again.endings, again.full) == ((0, 1, 0), (), ())
    store.check()


def test_each_response_has_its_own_limit():
    store = TokenStore()
    store.open_step(3, range(100, 103), [2, 5, 3], (STOP,))
    for assignment, response in ((11, 100), (12, 101), (13, 102)):
        store.assign(assignment, response, "i-a")
    accepted = store.accept(make_frame((11, 0, [1, 2]), (12, 0, [1, 2, 3]), (13, 0, [1, 2])))
    assert (counts(accepted), accepted.full) == ((7, 0, 0), (100,))
    accepted = store.accept(make_frame((12, 3, [4]), (13, 2, [3, 4])))
    assert (counts(accepted), accepted.full) == ((2, 1, 0), (102,))
    assert store.is_complete(101) is None
    assert store.accept(make_frame((12, 4, [5]))).full == (101,)
    assert [store.length(response) for response in (100, 101, 102)] == [2, 5, 3]
    store.check()


def test_a_full_response_that_its_engine_ended_is_reported_as_ended_only():
    store = make_store(max_tokens=2)
    store.assign(11, 100, "i-a")
    accepted = store.accept(make_frame((11, 0, [1, 2]), endings=(wire.AssignmentEnd(11, "length"),)))
    assert accepted.full == ()
    assert [ending.reason for ending in accepted.endings] == ["length"]


def test_a_stop_token_at_the_limit_is_a_stop():
    store = make_store(max_tokens=2)
    store.assign(11, 100, "i-a")
    assert store.accept(make_frame((11, 0, [1, STOP]))).full == (100,)
    assert store.is_complete(100) is FinishReason.STOP


def test_a_stop_token_at_the_end_completes_and_nothing_resumes_it():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1, STOP])))
    assert store.is_complete(100) is FinishReason.STOP
    assert store.assign(12, 100, "i-b") == 2
    assert counts(store.accept(make_frame((12, 2, [3])))) == (0, 1, 0)
    (ending,) = store.accept(make_frame(endings=(wire.AssignmentEnd(12, "stop"),))).endings
    assert (ending.response, ending.reason, ending.num_tokens) == (100, "stop", 2)
    assert store.assign(13, 100, "i-b") == 2
    assert counts(store.accept(make_frame((13, 2, [3])))) == (0, 1, 0)
    store.check()


def test_endings_apply_after_the_tokens_of_their_frame():
    store = make_store()
    for assignment, response in ((11, 100), (12, 101)):
        store.assign(assignment, response, "i-a")
    endings = (wire.AssignmentEnd(11, "stop"), wire.AssignmentEnd(12, "response_failed", "out of pages"))
    accepted = store.accept(make_frame((11, 0, [1, 2]), (12, 0, [3]), endings=endings))
    assert [(e.assignment, e.response, e.reason, e.problem, e.num_tokens) for e in accepted.endings] == [
        (11, 100, "stop", "", 2),
        (12, 101, "response_failed", "out of pages", 1),
    ]
    assert store.is_complete(100) is FinishReason.STOP
    assert store.is_complete(101) is None
    assert store.accept(make_frame((11, 2, [1]), endings=endings)).record is None


def test_segments_follow_instance_and_policy_version():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1]), version=5))
    store.accept(make_frame((11, 1, [1]), version=5))
    store.accept(make_frame((11, 2, [1]), version=6))
    store.assign(12, 100, "i-a")
    store.accept(make_frame((12, 3, [1]), version=6))
    store.assign(13, 100, "i-b")
    store.assign(14, 100, "i-a")
    store.accept(make_frame((14, 4, [1]), version=6))
    store.assign(15, 100, "i-b")
    store.accept(make_frame((15, 5, [1]), version=6))
    assert segments(store, 100) == [("i-a", 5, 2), ("i-a", 6, 3), ("i-b", 6, 1)]
    store.check()


def test_an_older_assignment_number_may_be_assigned_after_a_newer_one():
    store = make_store()
    for assignment, response in ((50_000, 100), (3, 101), (90_000, 102), (49_999, 103)):
        store.assign(assignment, response, "i-a")
    store.accept(make_frame((3, 0, [1]), (49_999, 0, [2]), (50_000, 0, [3]), (90_000, 0, [4])))
    assert [ids(store, response) for response in range(100, 104)] == [[3], [1], [4], [2]]
    store.check()


def test_a_new_step_forgets_the_former():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1, 2])))
    store.open_step(4, range(100, 102), [10] * 2, ())
    assert store.length(100) == 0
    assert counts(store.accept(make_frame((11, 2, [1])))) == (0, 1, 0)
    with pytest.raises(KeyError, match="response 102 is not one of step 4"):
        store.length(102)


def test_programming_errors_are_refused():
    store = make_store()
    store.assign(11, 100, "i-a")
    with pytest.raises(ValueError, match="assignment 11 already belongs to another response than 101"):
        store.assign(11, 101, "i-a")
    with pytest.raises(ValueError, match="not consecutive"):
        store.open_step(4, (1, 3), [10] * 2, ())


def column(values: list[int], dtype: str) -> bytes:
    return np.array(values, dtype).tobytes()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"assignments": b"\0" * 7}, "owners has 7 bytes, not a multiple of 4"),
        ({"counts": b"\0"}, "counts has 1 bytes, not a multiple of 2"),
        ({"assignments": column([11], "<u4")}, "1 owners, 2 offsets, 2 counts"),
        ({"offsets": column([0, 0, 0], "<u4")}, "2 owners, 3 offsets, 2 counts"),
        ({"counts": column([2, 2], "<u2")}, "the counts add up to 4, there are 3 token ids and 3 logprobs"),
        ({"logprobs": column([0], "<f4")}, "the counts add up to 3, there are 3 token ids and 1 logprobs"),
        ({"counts": column([3, 0], "<u2")}, "the count of owner 12 is 0"),
        ({"counts": column([0, 0], "<u2"), "token_ids": b"", "logprobs": b""}, "the count of owner 11 is 0"),
        ({"assignments": column([11, 11], "<u4")}, "owner 11 occurs twice"),
        ({"token_ids": column([1, -2, 3], "<i4")}, "token id -2 is negative"),
        ({"seq": -1}, "its number is negative"),
        ({"policy_version": -1}, "policy version -1 is not in 0"),
        (
            {"endings": (wire.AssignmentEnd(11, "stop"), wire.AssignmentEnd(11, "aborted"))},
            "assignment 11 ends twice",
        ),
        ({"endings": (wire.AssignmentEnd(11, "bored"),)}, "assignment 11 ends by 'bored'"),
        ({"endings": (wire.AssignmentEnd(11, "quarantined"),)}, "assignment 11 ends by 'quarantined'"),
    ],
)
def test_a_frame_that_contradicts_itself_is_refused_and_changes_nothing(change, found):
    store = make_store()
    store.assign(11, 100, "i-a")
    store.assign(12, 101, "i-a")
    fields = {
        "seq": 0,
        "policy_version": 5,
        "assignments": column([11, 12], "<u4"),
        "offsets": column([0, 0], "<u4"),
        "counts": column([2, 1], "<u2"),
        "token_ids": column([1, 2, 3], "<i4"),
        "logprobs": column([0, 0, 0], "<f4"),
    }
    with pytest.raises(ProtocolError) as caught:
        store.accept(wire.Frame(**{**fields, **change}))
    assert found in caught.value.problem
    assert store.length(100) == 0
    assert counts(store.accept(wire.Frame(**fields))) == (3, 0, 0)


def test_restored_records_give_the_same_responses_and_their_finishes():
    store = make_store(max_tokens=4)
    records = []
    for assignment, response, instance in ((11, 100, "i-a"), (12, 101, "i-b"), (13, 102, "i-a")):
        store.assign(assignment, response, instance)
    for frame in (
        make_frame((11, 0, [1, 2]), (12, 0, [3]), (13, 0, [4]), version=5),
        make_frame((12, 1, [5, 6, 8, 8]), version=6),
        make_frame((13, 1, [9]), endings=(wire.AssignmentEnd(11, "stop"), wire.AssignmentEnd(13, "aborted"))),
    ):
        record = store.accept(frame).record
        assert record is not None
        records.append(record)
    restored = make_store(max_tokens=4)
    finishes = [finish for record in records for finish in restored.restore(record)]
    assert finishes == [(101, FinishReason.LENGTH), (100, FinishReason.STOP)]
    assert restored.restore(records[0]) == []  # a second time: nothing new
    for response in range(100, 104):
        assert restored.token_ids(response) == store.token_ids(response)
        assert restored.logprobs(response) == store.logprobs(response)
        assert restored.segments(response) == store.segments(response)
        assert restored.is_complete(response) == store.is_complete(response)
    assert restored.assign(20, 102, "i-a") == 2
    assert counts(restored.accept(make_frame((20, 2, [1])))) == (1, 0, 0)
    restored.check()


def test_records_that_do_not_fit_are_refused():
    store = make_store()
    store.assign(11, 100, "i-a")
    store.accept(make_frame((11, 0, [1, 2])))
    second = store.accept(make_frame((11, 2, [3]))).record
    assert second is not None
    with pytest.raises(ProtocolError, match=r"tokens 2\.\.2 of response 100 come after 0"):
        make_store().restore(second)
    with pytest.raises(ProtocolError, match=r"responses outside 0\.\.3"):
        make_store(first=0).restore(second)
    other = TokenStore()
    other.open_step(4, range(100, 104), [10] * 4, ())
    with pytest.raises(ProtocolError, match="belongs to step 3, open is step 4"):
        other.restore(second)
    with pytest.raises(ProtocolError, match="journal record of 3 bytes"):
        other.restore(b"\x93\x01\x02")


def test_a_large_step_takes_no_memory_before_its_tokens_arrive():
    store = TokenStore()
    before = resident_bytes()
    store.open_step(0, range(20_000), [16_384] * 20_000, ())
    for response in range(0, 20_000, 100):
        store.assign(response, response, "i-a")
        store.accept(make_frame((response, 0, [1])))
    assert resident_bytes() - before < 64 * 2**20


def resident_bytes() -> int:
    psutil = pytest.importorskip("psutil")
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("limits", [[10, 10, 10], [10, 0, 10, 10], [10, 10, 10, 2**31], [10] * 5])
def test_limits_that_make_no_sense_are_refused(limits: list[int]) -> None:
    with pytest.raises(ValueError, match="limits of step 3"):
        TokenStore().open_step(3, range(100, 104), limits, (STOP,))


@pytest.mark.parametrize("limits", [[0], [5, 2**31]])
def test_limits_of_further_responses_are_checked_likewise(limits: list[int]) -> None:
    with pytest.raises(ValueError, match="limits of further responses of step 3"):
        make_store().extend(limits)


def test_an_extended_store_goes_on_with_the_first_and_takes_the_further_responses() -> None:
    store = make_store(2, max_tokens=3)
    store.assign(1, 100, "a")
    store.accept(make_frame((1, 0, [5])))
    store.extend([2, 4])
    store.check()
    assert ids(store, 100) == [5]
    store.accept(make_frame((1, 1, [6, 6, 6])))
    assert ids(store, 100) == [5, 6, 6], "its own limit is 3"
    for assignment, response, most in ((2, 102, 2), (3, 103, 4)):
        assert store.holds_response(response)
        store.assign(assignment, response, "b")
        store.accept(make_frame((assignment, 0, [8, 9, 8, 9, 8])))
        assert ids(store, response) == [8, 9, 8, 9][:most]
    assert not store.holds_response(104)
    store.check()


def test_it_holds_a_response_that_is_complete_with_as_many_tokens_for_that_reason() -> None:
    store = make_store(3, max_tokens=2)
    for assignment, response, tokens in ((1, 100, [5, 6]), (2, 101, [5, STOP]), (3, 102, [5])):
        store.assign(assignment, response, "a")
        store.accept(make_frame((assignment, 0, tokens)))
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert store.holds(100, 2, length)
    assert not store.holds(100, 2, stop)
    assert not store.holds(100, 1, length)
    assert store.holds(101, 2, stop)
    assert store.holds(101, 2, length), "an engine may say either of a stop token at the limit"
    assert not store.holds(102, 1, stop), "it is not complete"
