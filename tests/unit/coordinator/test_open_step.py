"""The responses of a step whose prompts differ in number of responses, length and sampling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rlboost_runtime.coordinator.driver.core_driver import OpenStep
from rlboost_runtime.coordinator.status import _unfinished_tokens
from rlboost_runtime.protocol.messages import PromptSpec, Sampling, StepStartedMessage

GREEDY = Sampling(temperature=0.0)


def token_ids(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


STEP = OpenStep(
    StepStartedMessage(
        3,
        7,
        (
            PromptSpec(0, token_ids(1, 2)),
            PromptSpec(1, token_ids(3), num_responses=1, max_tokens=50, sampling=GREEDY),
            PromptSpec(2, token_ids(4, 5, 6), num_responses=3),
        ),
        group_size=2,
        max_response_tokens=10,
    ),
    first_response=100,
)


def test_groups_of_different_sizes_lie_one_after_the_other():
    assert [STEP.responses_of(group) for group in range(3)] == [
        range(100, 102), range(102, 103), range(103, 106),
    ]  # fmt: skip
    assert STEP.all_responses() == range(100, 106)
    asked = [(each.response, each.group, each.prompt_tokens, each.max_tokens) for each in STEP.requests()]
    assert asked == [
        (100, 0, 2, 10), (101, 0, 2, 10), (102, 1, 1, 50), (103, 2, 3, 10), (104, 2, 3, 10), (105, 2, 3, 10),
    ]  # fmt: skip
    assert STEP.limits() == [10, 10, 50, 10, 10, 10]


def test_work_goes_on_behind_what_is_kept_under_the_prompts_own_limit_and_sampling():
    item = STEP.work(102, 9, token_ids(8, 8), 3)
    assert (item.token_ids, item.offset, item.max_new_tokens) == (token_ids(3, 8, 8), 2, 48)
    assert (item.assignment, item.policy_version, item.sampling) == (9, 3, GREEDY)
    assert STEP.work(105, 9, b"", 3).token_ids == token_ids(4, 5, 6)
    assert STEP.work(105, 9, b"", 3).sampling is None


def test_status_counts_the_tokens_of_a_step_that_the_core_lost_in_a_power_cut() -> None:
    core = SimpleNamespace(open_steps=[])
    state: Any = SimpleNamespace(open_steps=[STEP], core=core, store=SimpleNamespace(length=lambda _: 3))
    assert _unfinished_tokens(state) == 3 * len(STEP.all_responses())
