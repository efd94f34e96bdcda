"""Steps requested ahead: never more than `max_staleness`, never before the one before them has arrived."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.rollout.groups import RequestedStep, RequestedSteps

PROMPT = Prompt(0, "p", (1,), {})


def requested(step: int, updates: int, groups: int = 2) -> RequestedStep[int]:
    return RequestedStep(step, updates, updates, [PROMPT] * groups)


def test_a_synchronous_run_asks_for_nothing_ahead() -> None:
    steps = RequestedSteps[int](0, 10)
    steps.add(requested(0, 0))
    steps.newest.arrived += [0, 1]
    assert steps.next_ahead(0) is None


def test_the_next_step_is_requested_once_this_one_has_arrived() -> None:
    steps = RequestedSteps[int](1, 3)
    steps.add(requested(0, 0))
    steps.newest.arrived.append(1)
    assert steps.next_ahead(0) is None
    steps.newest.arrived.append(0)
    assert steps.next_ahead(0) == 1
    steps.add(requested(1, 0))
    assert steps.newest.staleness == 1
    steps.newest.arrived += [0, 1]
    assert steps.next_ahead(0) is None, "its tokens would be two updates old"
    steps.remove(0)
    assert steps.next_ahead(1) == 2
    assert steps.versions() == [[1, 0, 0]]
    steps.add(requested(2, 1))
    steps.newest.arrived += [0, 1]
    steps.remove(1)
    assert steps.next_ahead(2) is None, "there are only three"


def test_with_in_flight_updates_a_step_is_requested_before_the_one_before_it_has_arrived() -> None:
    steps = RequestedSteps[int](2, 9, asks_early=True)
    assert RequestedSteps[int](2, 9).open_from is None
    for step in (0, 1, 2):
        assert step == 0 or steps.next_ahead(0) == step
        steps.add(requested(step, 0))
    assert steps.next_ahead(0) is None, "its tokens would be three updates old"
    assert steps.open_from == 0
    steps.remove(0)
    assert steps.open_from == 1
    assert steps.next_ahead(1) == 3
    with pytest.raises(AssertionError):
        RequestedSteps[int](1, 9).add(requested(0, 0)) or steps.add(requested(2, 2))


def test_a_step_that_would_be_too_old_is_refused() -> None:
    with pytest.raises(AssertionError):
        RequestedSteps(1, 9).add(requested(5, 3))


@pytest.mark.property
@settings(deadline=None)
@given(st.integers(0, 4), st.lists(st.booleans(), max_size=60))
def test_no_token_is_older_than_allowed_whatever_the_order(bound: int, arrives: list[bool]) -> None:
    steps, training = RequestedSteps[int](bound, 12), 0
    steps.add(requested(0, 0, 1))
    for one_arrives in arrives:
        if one_arrives and not steps.newest.is_complete:
            steps.newest.arrived.append(0)
        elif not one_arrives and (current := steps.get(training)) is not None and current.is_complete:
            assert current.staleness <= bound
            steps.remove(training)
            training += 1
            if training < 12 and steps.get(training) is None:
                steps.add(requested(training, training, 1))
        if training == 12:
            return
        while (ahead := steps.next_ahead(training)) is not None:
            steps.add(requested(ahead, training, 1))
