"""Responses whose log-probabilities are computed before their group is complete."""

from dataclasses import replace

import numpy as np

from rlboost_runtime.job.evaluation import EvaluationFile
from rlboost_runtime.protocol.messages import DeliverResponseMessage, FinishedResponse
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.rollout.early import EarlyResponses

PROMPT = Prompt(0, "p", (7, 8), {})


def prompt_of(step: int, group: int) -> Prompt | None:
    held_out = replace(PROMPT, evaluation=EvaluationFile(source="held_out.jsonl"))
    return {0: PROMPT, 1: PROMPT, 2: held_out}.get(group) if step < 3 else None


def early(
    place: int, ids: list[int], step: int = 0, group: int = 0, logprob: float = -1.0
) -> DeliverResponseMessage:
    token_ids, logprobs = np.array(ids, "<i4").tobytes(), np.full(len(ids), logprob, "<f4").tobytes()
    return DeliverResponseMessage(
        step, group, place, FinishedResponse(place, token_ids, logprobs, (), "stop")
    )


def sample(ids: list[int]) -> Sample:
    return Sample(np.array([7, 8], np.int32), np.array(ids, np.int32), np.zeros(len(ids), np.float32), 0.0)


def scored(samples: list[Sample]) -> list[Sample]:
    return [
        replace(
            s, reference_logprobs=s.token_ids.astype(np.float32), old_logprobs=np.float32(-1) * s.token_ids
        )
        for s in samples
    ]


def test_what_was_computed_is_used_for_the_same_tokens_alone() -> None:
    responses = EarlyResponses(prompt_of)
    for place, ids in enumerate([[1, 2], [3], [4]]):
        responses.arrived(early(place, ids))
    assert responses.num_waiting(0) == 3
    responses.score(0, 99, scored)
    assert responses.num_waiting(0) == 0
    group = [sample([1, 2]), sample([5]), sample([4]), sample([6])]  # the second was generated again
    found = list(responses.completed(0, 0, group))
    assert [s.reference_logprobs is not None for s in found] == [True, False, True, False]
    assert found[0].reference_logprobs is not None
    assert found[0].reference_logprobs.tolist() == [1, 2]
    assert found[0].old_logprobs is not None
    assert found[0].old_logprobs.tolist() == [-1, -2]
    assert found[0].logprobs.tolist() == [0, 0], "the group's own logprobs count"
    assert responses.num_used == 2
    assert list(responses.completed(0, 0, group)) == group, "it is forgotten"


def test_only_so_many_of_the_step_that_is_trained_are_scored() -> None:
    responses = EarlyResponses(prompt_of)
    responses.arrived(early(0, [1], step=1))
    for place in range(3):
        responses.arrived(early(place, [2]))
    sizes: list[int] = []

    def score(samples: list[Sample]) -> list[Sample]:
        sizes.append(len(samples))
        return scored(samples)

    responses.score(0, 2, score)
    assert sizes == [2]
    assert (responses.num_waiting(0), responses.num_waiting(1)) == (1, 1)


def test_a_group_that_came_first_is_not_scored_again() -> None:
    responses = EarlyResponses(prompt_of)
    responses.arrived(early(0, [1]))
    group = [sample([1])]
    assert list(responses.completed(0, 0, group)) == group
    assert responses.num_waiting(0) == 0


def test_what_cannot_be_trained_is_left_to_its_group() -> None:
    responses = EarlyResponses(prompt_of)
    responses.arrived(early(0, [1], group=2))  # an evaluation's
    responses.arrived(early(0, [1], group=9))
    responses.arrived(early(0, [1], step=7))
    responses.arrived(early(0, []))
    responses.arrived(early(0, [1], logprob=float("nan")))
    assert [responses.num_waiting(step) for step in (0, 7)] == [0, 0]


def test_steps_that_are_over_are_forgotten() -> None:
    responses = EarlyResponses(prompt_of)
    for step in (0, 1):
        responses.arrived(early(0, [1], step=step))
        responses.score(step, 1, scored)
        responses.arrived(early(1, [1], step=step))
    responses.forget(0)
    assert (responses.num_waiting(0), responses.num_waiting(1)) == (0, 1)
    assert next(responses.completed(0, 0, [sample([1])])).old_logprobs is None
    assert next(responses.completed(1, 0, [sample([1])])).old_logprobs is not None
