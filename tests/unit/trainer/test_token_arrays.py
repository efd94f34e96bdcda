"""Tokens and logprobs stay arrays from the coordinator's bytes to the padded tensor."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlboost_runtime.job import Algorithm
from rlboost_runtime.protocol.messages import DeliverGroupMessage, FinishedResponse, Segment
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.learn import learner, ranks
from rlboost_runtime.trainer.learn.packing import pack
from rlboost_runtime.trainer.learn.policy import Forward
from rlboost_runtime.trainer.learn.ranks import Accumulate
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.rewards.outcome import Reward
from rlboost_runtime.trainer.rewards.scorer import RewardCall
from rlboost_runtime.trainer.rollout.groups import GroupScorer, ScoredGroup

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, TOKENS = 8, 50_000
ARRAY_BYTES = SIZE * TOKENS * 8
"""An int32 and a float32 for each token."""
PROMPT = Prompt(0, "p", (1, 2), {})


class Scorer:
    name = "rewards.py:score"

    def submit_group(self, calls: list[RewardCall], reward: str | None = None) -> list[Future[Reward]]:
        futures: list[Future[Reward]] = [Future() for _ in calls]
        for future, call in zip(futures, calls, strict=True):
            future.set_result(Reward(float(len(call.response))))
        return futures


def delivered() -> DeliverGroupMessage:
    draw = np.random.default_rng(0)
    return DeliverGroupMessage(
        0, 0, tuple(
            FinishedResponse(
                number, draw.integers(0, 150_000, TOKENS).astype("<i4").tobytes(),
                draw.normal(-1, 0.1, TOKENS).astype("<f4").tobytes(), (Segment("i", 0, TOKENS),), "stop",
            )
            for number in range(SIZE)
        ),
    )  # fmt: skip


def scored(group: DeliverGroupMessage) -> ScoredGroup:
    scorer = GroupScorer(lambda ids: "text", Scorer(), Algorithm(group_size=SIZE))
    scorer.expect(0, 0, [PROMPT])
    return scorer.finish(scorer.start(group), lambda: None)


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def samples() -> list[Sample]:
    return [response.samples[0] for response in scored(delivered()).responses]


def test_samples_are_views_of_the_bytes_that_arrived():
    group = delivered()
    scored(group)  # imports and caches
    assert peak_bytes(lambda: scored(group)) < ARRAY_BYTES / 8
    for response, given in zip(scored(group).responses, group.responses, strict=True):
        sample = response.samples[0]
        assert (sample.prompt_ids.dtype, sample.token_ids.dtype) == (np.int32, np.int32)
        assert sample.logprobs.dtype == np.float32
        assert (sample.token_ids.tobytes(), sample.logprobs.tobytes()) == (given.token_ids, given.logprobs)


def test_ranks_exchange_bytes():
    sent = samples()
    sent[0] = replace(sent[0], old_logprobs=sent[0].logprobs)

    def exchange() -> list[Sample]:
        command = ranks._decoder.decode(ranks._encoder.encode(Accumulate(sent)))
        assert isinstance(command, Accumulate)
        return command.samples

    assert peak_bytes(exchange) < 3 * ARRAY_BYTES
    for found, wanted in zip(exchange(), sent, strict=True):
        for name in ("prompt_ids", "token_ids", "logprobs"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        assert (found.advantage, found.usable) == (wanted.advantage, wanted.usable)
    assert np.array_equal(exchange()[0].old_logprobs, sent[0].logprobs)
    assert exchange()[1].old_logprobs is None


def test_the_padded_tensor_is_made_of_arrays():
    found = samples()
    like = torch.zeros(SIZE, TOKENS)
    forward = Forward(like, like, like)
    assert peak_bytes(lambda: learner._table([each.logprobs for each in found], forward)) < 2 * ARRAY_BYTES
    prompts, responses = [each.prompt_ids for each in found], [each.token_ids for each in found]
    pack(prompts, responses)
    assert peak_bytes(lambda: pack(prompts, responses)) < 5 * ARRAY_BYTES  # indices are int64
