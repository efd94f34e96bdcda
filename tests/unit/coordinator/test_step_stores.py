"""The token stores of several open steps behind one frame."""

from __future__ import annotations

import numpy as np
import pytest

from rlboost_runtime.coordinator.storage.token_store import StepStores, TokenStore
from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol.messages import AssignmentEnd, Frame

STOP = 9


def frame(seq: int, entries: list[tuple[int, int, list[int]]], *endings: AssignmentEnd) -> Frame:
    tokens = [token for _, _, ids in entries for token in ids]
    return Frame(
        seq=seq,
        policy_version=3,
        assignments=np.array([each[0] for each in entries], "<u4").tobytes(),
        offsets=np.array([each[1] for each in entries], "<u4").tobytes(),
        counts=np.array([len(each[2]) for each in entries], "<u2").tobytes(),
        token_ids=np.array(tokens, "<i4").tobytes(),
        logprobs=np.full(len(tokens), -0.5, "<f4").tobytes(),
        endings=endings,
    )


def ids(stores: StepStores, response: int) -> list[int]:
    return np.frombuffer(stores.token_ids(response), "<i4").tolist()


@pytest.fixture
def stores() -> StepStores:
    """Step 4 with responses 10 and 11, step 5 with 12 and 13; assignments 0 to 3."""
    stores = StepStores()
    for step, responses in ((5, range(12, 14)), (4, range(10, 12))):
        store = TokenStore()
        store.open_step(step, responses, [6] * 2, (STOP,), 100)
        stores.add(step, store)
    for assignment, response in enumerate(range(10, 14)):
        stores.assign(assignment, response, "a")
    return stores


def test_each_step_gets_its_own_part(stores: StepStores) -> None:
    found = stores.accept(frame(0, [(3, 0, [1]), (0, 0, [2, STOP]), (2, 0, [3])], AssignmentEnd(0, "stop")))
    assert [step for step, _ in found.records] == [4, 5]
    assert (found.num_accepted, found.num_dropped, found.num_duplicate) == (4, 0, 0)
    assert [ending.response for ending in found.endings] == [10]
    assert [ids(stores, response) for response in range(10, 14)] == [[2, STOP], [], [3], [1]]
    assert stores.is_complete(10) is FinishReason.STOP
    restored = TokenStore()
    restored.open_step(4, range(10, 12), [6] * 2, (STOP,), 100)
    assert restored.restore(found.records[0][1]) == [(10, FinishReason.STOP)]
    stores.check()


def test_tokens_of_no_current_assignment_are_dropped_once(stores: StepStores) -> None:
    found = stores.accept(frame(0, [(77, 0, [1, 2]), (1, 0, [5])]))
    assert (found.num_accepted, found.num_dropped) == (1, 2)
    stores.unassign(1)
    assert stores.accept(frame(1, [(1, 1, [6])])).num_dropped == 1


def test_a_frame_of_which_one_part_is_unfit_changes_neither_step(stores: StepStores) -> None:
    with pytest.raises(ProtocolError, match="token id 100"):
        stores.accept(frame(0, [(0, 0, [1]), (2, 0, [100])]))
    assert ids(stores, 10) == []
    with pytest.raises(ProtocolError):
        stores.accept(frame(0, [(0, 0, [1])], AssignmentEnd(2, "nonsense")))
    assert ids(stores, 10) == []


def test_an_assignment_is_foreign_whichever_step_it_is_of(stores: StepStores) -> None:
    assert not stores.is_foreign(frame(0, [(0, 0, [1]), (3, 0, [1])]), "a")
    assert stores.is_foreign(frame(0, [(0, 0, [1])]), "b")
    assert stores.is_foreign(frame(0, [(3, 0, [1])]), "b")


def test_a_step_that_is_not_kept_is_forgotten(stores: StepStores) -> None:
    stores.keep({5})
    with pytest.raises(KeyError):
        stores.length(10)
    assert stores.accept(frame(0, [(0, 0, [1]), (2, 0, [3])])).num_dropped == 1
    stores.keep(())
    assert stores.accept(frame(1, [(2, 1, [3])])).num_dropped == 1


def test_a_complete_response_is_found_in_its_step(stores: StepStores) -> None:
    stores.accept(frame(0, [(1, 0, [1, STOP]), (2, 0, [1, 2, 3, 4, 5, 6])]))
    assert stores.holds(11, 2, FinishReason.STOP)
    assert not stores.holds(11, 3, FinishReason.STOP)
    assert stores.holds(12, 6, FinishReason.LENGTH)
    assert not stores.holds(10, 0, FinishReason.STOP)
