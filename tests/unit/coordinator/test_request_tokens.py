"""The rules by which a request outside a step gets its tokens, one by one."""

from __future__ import annotations

from array import array

import pytest

from rlboost_runtime.coordinator.storage.request_tokens import RequestRecord, RequestTokens
from rlboost_runtime.core.base.messages import FinishReason, ReleaseReason
from rlboost_runtime.protocol.messages import GenerateMessage, Sampling

STOP = 7


def request(max_tokens: int = 6) -> RequestTokens:
    asked = GenerateMessage("one", b"", max_tokens, Sampling(stop_token_ids=(STOP,)))
    return RequestTokens(40, asked)


def columns(*ids: int) -> tuple[bytes, bytes]:
    return array("i", ids).tobytes(), array("f", [-float(each) for each in ids]).tobytes()


def add(
    to: RequestTokens, offset: int, *ids: int, version: int = 2, instance: str | None = None
) -> RequestRecord | None:
    if instance is not None:
        to.assign(to.assignment or 1, instance)
    return to.accept(offset, array("i", ids), array("f", [-float(each) for each in ids]), version)


def restored(*records: RequestRecord, max_tokens: int = 6) -> RequestTokens:
    made = request(max_tokens)
    for record in records:
        made.restore(record)
    return made


def what_it_holds(one: RequestTokens) -> tuple[object, ...]:
    return one.ids, one.logprobs, one.segments, one.reason


def test_tokens_are_added_once_and_in_order() -> None:
    one = request()
    assert one.assign(11, "a") == 0
    record = add(one, 0, 1, 2)
    assert record == RequestRecord(
        40, 0, "a", 2, array("i", [1, 2]).tobytes(), array("f", [-1, -2]).tobytes()
    )
    assert add(one, 0, 1, 2) is None, "a duplicate"
    again = add(one, 1, 2, 3)
    assert again == RequestRecord(40, 2, "a", 2, *columns(3))
    assert one.ids.tolist() == [1, 2, 3]
    assert one.logprobs.tolist() == [-1, -2, -3]
    assert one.segments == [(0, "a", 2)]
    assert one.complete is None


def test_a_delta_behind_a_gap_is_not_added_and_makes_a_finish_a_failure() -> None:
    one = request()
    one.assign(11, "a")
    add(one, 0, 1)
    assert add(one, 2, 3, 4) is None
    assert add(one, 2, 3) is None, "a shorter one does not make the furthest nearer"
    add(one, 1, 2, 3)
    assert one.end("stop") == (ReleaseReason.ENGINE_FAILED, None), "token 4 is owed"
    assert one.assignment is None
    assert one.assign(12, "b") == 3, "another assignment owes nothing"
    reason, record = one.end("stop")
    assert (reason, one.complete) == ("stop", FinishReason.STOP)
    assert record == RequestRecord(40, 3, "b", 0, b"", b"", "stop")


def test_what_is_owed_beyond_the_limit_is_not_owed() -> None:
    one = request(3)
    one.assign(11, "a")
    add(one, 2, 3, 4, 5)
    add(one, 0, 1, 2, 3)
    assert one.complete is FinishReason.LENGTH
    assert one.end("length")[0] == "length"


@pytest.mark.parametrize("reason", ["aborted", "engine_failed"])
def test_an_assignment_that_ends_otherwise_leaves_it_open(reason: str) -> None:
    one = request()
    one.assign(11, "a")
    add(one, 0, 1)
    assert one.end(reason) == (reason, None)
    assert (one.complete, one.assignment) == (None, None)


def test_it_is_complete_with_its_limit_or_a_stop_token_and_takes_nothing_then() -> None:
    full = request(3)
    full.assign(11, "a")
    record = add(full, 0, 1, 2, 3, 4)
    assert record is not None
    assert record.reason == "length"
    assert full.ids.tolist() == [1, 2, 3]
    stopped = request()
    stopped.assign(11, "a")
    record = add(stopped, 0, 1, STOP)
    assert record is not None
    assert record.reason == "", "the token itself says it"
    assert stopped.complete is FinishReason.STOP
    assert add(stopped, 2, 5) is None
    both = request(2)
    both.assign(11, "a")
    record = add(both, 0, 1, STOP)
    assert record is not None
    assert record.reason == "stop"


def test_it_may_be_completed_with_what_there_is() -> None:
    one = request()
    one.assign(11, "a")
    add(one, 0, 1, 2)
    record = one.complete_with(FinishReason.LENGTH)
    assert record == RequestRecord(40, 2, "a", 0, b"", b"", "length")
    assert one.assignment is None
    assert add(one, 2, 3) is None


def test_all_records_in_order_restore_what_there_was() -> None:
    one = request()
    written = [add(one, 0, 1, 2, instance="a"), add(one, 2, 3, version=3), add(one, 3, 4, instance="b")]
    records = [record for record in written if record is not None]
    assert one.segments == [(0, "a", 2), (2, "a", 3), (3, "b", 2)]
    assert what_it_holds(restored(*records)) == what_it_holds(one)
    assert what_it_holds(restored(*one.records())) == what_it_holds(one)
    assert what_it_holds(restored(*records, *records)) == what_it_holds(one), "applied twice"
    ending = one.complete_with(FinishReason.STOP)
    whole = restored(*records, ending)
    assert (whole.reason, whole.durable, whole.is_over) == (FinishReason.STOP, 4, True)
    assert what_it_holds(restored(*one.records())) == what_it_holds(one)
    part = restored(*records)
    assert (part.durable, part.is_over, part.problem) == (4, False, "")


def test_records_with_a_gap_are_a_problem_that_names_the_tokens() -> None:
    found = restored(RequestRecord(40, 3, "a", 2, *columns(5)))
    assert found.problem == "tokens 0 to 2 of it are not in the journal"
    assert not found.ids


def test_versions_are_those_of_the_durable_tokens_from_there_on() -> None:
    one = request()
    add(one, 0, 1, 2, instance="a", version=2)
    add(one, 2, 3, 4, version=3)
    add(one, 4, 5, version=5)
    assert one.versions(0) == ()
    one.durable = 5
    assert one.versions(0) == ((2, 2), (3, 2), (5, 1))
    assert one.versions(1) == ((2, 1), (3, 2), (5, 1))
    assert one.versions(2) == ((3, 2), (5, 1))
    one.durable = 3
    assert one.versions(1) == ((2, 1), (3, 1))
