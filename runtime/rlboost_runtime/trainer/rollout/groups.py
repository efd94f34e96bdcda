"""From finished groups to samples: texts are scored as groups arrive, advantages follow once a group's
rewards are in.

Rules: each token keeps the logprob of the segment that produced it; a response cut by a
migration is not truncated, only `length` is; a quarantined response is masked out of the loss and of its
group's statistics; with `mask_truncated` a truncated one only out of the loss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch

from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.job import Algorithm
from rlboost_runtime.protocol.messages import DeliverGroupMessage, FinishedResponse
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.learn.losses import group_advantages, overlong_penalty
from rlboost_runtime.trainer.learn.sample import Logprobs, Sample, TokenIds
from rlboost_runtime.trainer.rewards.outcome import Reward, RewardWatch
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer

_RECALL_CHECK_S = 0.1  # while rewards are slow, so often somebody may ask for the GPU


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """One response of a step as metrics see it. `reward` is the plain one, without the overlong term."""

    sample: Sample
    reward: Reward
    finish_reason: str
    num_segments: int
    finite: bool
    """Whether the engine's logprobs are numbers; if not, the response is masked out."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The responses of one prompt."""

    group: int
    responses: tuple[ScoredResponse, ...]

    @property
    def zero_variance(self) -> bool:
        """Whether nothing can be learnt from it."""
        return all(response.sample.advantage == 0 for response in self.responses)


@dataclass(frozen=True, slots=True)
class _Decoded:
    response: FinishedResponse
    token_ids: TokenIds
    logprobs: Logprobs
    reward: Future[Reward]


@dataclass(frozen=True, slots=True)
class _ExpectedStep:
    """A step whose groups may arrive; `arrived` by group, until they are collected."""

    policy_version: int
    prompts: Sequence[Prompt]
    arrived: dict[int, list[_Decoded]] = field(default_factory=dict)


class GroupScorer:
    """Scores groups of the steps that are under way. `arrived` is called from the stream's thread, the rest
    from ours."""

    def __init__(self, decode: Callable[[TokenIds], str], scorer: RewardScorer, algorithm: Algorithm) -> None:
        self._decode = decode
        self._scorer = scorer
        self._watch = RewardWatch(scorer.name)
        self._algorithm = algorithm
        self._lock = threading.Lock()
        self._steps: dict[int, _ExpectedStep] = {}
        self.reward_wait_s = 0.0
        """Seconds that `collect` has waited for rewards, in all."""

    def expect(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> None:
        """Expect the groups of `step`."""
        with self._lock:
            self._steps[step] = _ExpectedStep(policy_version, prompts)

    def forget(self, step: int) -> None:
        """Expect nothing more of `step`."""
        with self._lock:
            self._steps.pop(step, None)

    def arrived(self, group: DeliverGroupMessage) -> None:
        """Check the group and start scoring it. Raises `ProtocolError` for a group that makes no sense."""
        with self._lock:
            expected = self._steps.get(group.step)
            if expected is None:
                return
            prompt = expected.prompts[group.group]
            if len(group.responses) != self._algorithm.group_size:
                raise ProtocolError(
                    f"group {group.group} of step {group.step} has {len(group.responses)} responses,"
                    f" not {self._algorithm.group_size}",
                    "see the coordinator's log",
                )
            version = expected.policy_version
            where = f"step {group.step}"
            expected.arrived[group.group] = [
                self._start(prompt, response, version, where) for response in group.responses
            ]

    def _start(self, prompt: Prompt, response: FinishedResponse, version: int, where: str) -> _Decoded:
        token_ids = np.frombuffer(response.token_ids, "<i4")
        logprobs = np.frombuffer(response.logprobs, "<f4")
        _check(response, len(token_ids), len(logprobs), version, where)
        call = RewardCall(prompt.text, self._decode(token_ids), prompt.row)
        return _Decoded(response, token_ids, logprobs, self._scorer.submit(call))

    def collect(self, step: int, group: int, between: Callable[[], None]) -> ScoredGroup:
        """Return the scored group; waits for its rewards, calling `between` now and then meanwhile.

        Raises `RuntimeFault` where the rewards show that the reward function is broken.
        """
        with self._lock:
            expected = self._steps[step]
            decoded, prompt = expected.arrived.pop(group), expected.prompts[group]
        started = time.monotonic()
        futures = [entry.reward for entry in decoded]
        while wait(futures, timeout=_RECALL_CHECK_S).not_done:
            between()
        self.reward_wait_s += time.monotonic() - started
        self._watch.saw(future.result() for future in futures)
        return score_group(group, prompt, decoded, self._algorithm)


def _check(
    response: FinishedResponse, num_tokens: int, num_logprobs: int, policy_version: int, where: str
) -> None:
    where = f"response {response.response} of {where}"
    if not num_tokens == num_logprobs == sum(segment.num_tokens for segment in response.segments):
        raise ProtocolError(
            f"{where}: {num_tokens} tokens, {num_logprobs} logprobs and segments of"
            f" {sum(segment.num_tokens for segment in response.segments)}",
            "see the coordinator's log",
        )
    versions = {segment.policy_version for segment in response.segments} - {policy_version}
    if versions:  # each step is rolled out under one version: another one's token would be taken for newer
        raise ProtocolError(
            f"{where}: tokens of policy version {min(versions)} in a step of version {policy_version}",
            "see the coordinator's log",
        )


def score_group(group: int, prompt: Prompt, decoded: Sequence[_Decoded], algorithm: Algorithm) -> ScoredGroup:
    """Return the group with its advantages."""
    rewards = [entry.reward.result() for entry in decoded]
    finite = [bool(np.isfinite(entry.logprobs).all()) for entry in decoded]
    usable = [
        ok and entry.response.finish_reason != FinishReason.QUARANTINED
        for ok, entry in zip(finite, decoded, strict=True)
    ]
    shaped = [
        reward.value
        + overlong_penalty(
            len(entry.token_ids), algorithm.max_response_tokens, algorithm.overlong_penalty_tokens
        )
        for reward, entry in zip(rewards, decoded, strict=True)
    ]
    prompt_ids = np.array(prompt.token_ids, np.int32)
    advantages = group_advantages(
        torch.tensor([shaped], dtype=torch.float64), torch.tensor([usable]), algorithm.loss
    )[0].tolist()
    trained = [
        ok and not (algorithm.mask_truncated and entry.response.finish_reason == FinishReason.LENGTH)
        for ok, entry in zip(usable, decoded, strict=True)
    ]
    return ScoredGroup(
        group,
        tuple(
            ScoredResponse(
                Sample(prompt_ids, entry.token_ids, entry.logprobs, advantages[i], trained[i]),
                rewards[i],
                entry.response.finish_reason,
                len(entry.response.segments),
                finite[i],
            )
            for i, entry in enumerate(decoded)
        ),
    )
