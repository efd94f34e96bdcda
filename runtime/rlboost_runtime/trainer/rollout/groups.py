"""From finished groups to samples: texts are scored as groups arrive, advantages follow once a group's
rewards are in.

Rules: each token keeps the logprob of the segment that produced it; a response cut by a
migration is not truncated, only `length` is; a quarantined response is masked out of the loss and of its
group's statistics; with `mask_truncated` a truncated one only out of the loss.

Steps may be requested while an earlier one is trained (`RequestedSteps`): step m while step n is the next to
be trained if m <= n + max_staleness, and only once all groups of step m - 1 have arrived. It is rolled out
whole under the version published last, and is trained after n' <= max_staleness further updates: no token is
older than that. A response is never cut because a version was published. With `max_staleness` 0 nothing is
requested ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch

from rlboost_runtime.core.base.messages import FinishReason
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.inference.episodes import RecordedSample
from rlboost_runtime.job import WITHOUT_RATIO, Algorithm
from rlboost_runtime.protocol.messages import DeliverGroupMessage, FinishedResponse
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.episodes.outcome import EpisodeResult, EpisodeWatch
from rlboost_runtime.trainer.learn.losses import KlEstimator, group_advantages, kl_terms, overlong_penalty
from rlboost_runtime.trainer.learn.sample import Sample, TokenIds, chosen_responses
from rlboost_runtime.trainer.rewards.outcome import Reward, RewardWatch
from rlboost_runtime.trainer.rewards.scorer import RewardCall, RewardScorer
from rlboost_runtime.trainer.rollout.turn_rewards import (
    are_flat,
    at_turns_ends,
    per_token,
    returns,
    turn_advantages,
)

_RECALL_CHECK_S = 0.1
"""Longest time between two checks for a recall of the GPU while rewards are slow."""


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """One response of a step, or one episode, as metrics see it. `reward` is the plain one, without the
    overlong term."""

    samples: tuple[Sample, ...]
    """A response's only one; an episode's, in the order in which they began."""
    reward: Reward
    finish_reason: str
    num_segments: int
    """Machines in a row that made it: more than 1, and it was migrated."""
    newer_tokens: int
    """Tokens of versions that were published after its step was requested."""
    finite: bool
    """False where an engine's logprob is no number; the response is then masked out."""

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(sample.num_sampled for sample in self.samples)

    def text(self, decode: Callable[[TokenIds], str]) -> str:
        """Return the response as text; of an episode what followed the prompt of its last sample."""
        return decode(self.samples[-1].token_ids) if self.samples else ""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The responses of one prompt."""

    group: int
    responses: tuple[ScoredResponse, ...]

    zero_variance: bool
    """True if its rewards, before penalties for length and KL, are all equal or fewer than two of several
    count: it teaches nothing of the task."""
    episodes: Sequence[EpisodeResult] = ()

    @property
    def usable_rewards(self) -> list[float]:
        """Rewards, before penalties, of the responses that have one and were not given up."""
        return [
            each.reward.value
            for each in self.responses
            if each.finite and each.finish_reason != FinishReason.QUARANTINED and each.reward.failure is None
        ]


@dataclass(frozen=True, slots=True)
class _PendingResponse:
    samples: tuple[Sample, ...]
    """Without their advantages."""
    finish_reason: str
    num_segments: int
    newer_tokens: int
    reward: Future[Reward]
    episode: EpisodeResult | None = None

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_sampled for sample in self.samples)

    @property
    def is_finite(self) -> bool:
        return all(bool(np.isfinite(sample.logprobs).all()) for sample in self.samples)

    @property
    def is_usable(self) -> bool:
        return self.is_finite and self.finish_reason != FinishReason.QUARANTINED

    def kl(self, estimator: KlEstimator) -> float:
        """Return the sum of KL(policy || reference) over the tokens, as the engine sampled them."""
        return sum(_kl(sample, estimator) for sample in self.samples)


def _kl(sample: Sample, estimator: KlEstimator) -> float:
    if sample.reference_logprobs is None:
        return 0.0
    engine, reference = (torch.tensor(each) for each in (sample.logprobs, sample.reference_logprobs))
    terms = kl_terms(engine.double(), reference.double(), estimator)
    return float((terms if sample.sampled is None else terms[torch.from_numpy(sample.sampled)]).sum())


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """The responses of one prompt while their rewards are computed."""

    step: int
    group: int
    prompt: Prompt
    responses: Sequence[_PendingResponse]
    episodes: Sequence[EpisodeResult] = ()

    def samples(self) -> list[Sample]:
        """Return the samples of all responses, without their advantages."""
        return [
            replace(sample, usable=entry.is_usable) for entry in self.responses for sample in entry.samples
        ]

    def with_samples(self, samples: Iterator[Sample]) -> PendingGroup:
        """Return it with the next of `samples` in the place of its own."""
        responses = [
            replace(entry, samples=tuple(next(samples) for _ in entry.samples)) for entry in self.responses
        ]
        return replace(self, responses=responses)


Group = TypeVar("Group")


@dataclass(slots=True)
class RequestedStep(Generic[Group]):
    """A step that was requested and is not trained yet."""

    step: int
    policy_version: int
    updates: int
    """Steps whose updates are in that version."""
    prompts: list[Prompt]
    arrived: list[Group] = field(default_factory=list)
    """Groups that have arrived, in that order."""
    num_refills: int = 0
    """How often more prompts were asked for."""

    @property
    def is_complete(self) -> bool:
        """True once all its groups have arrived."""
        return len(self.arrived) == len(self.prompts)

    def place(self, group: int) -> int:
        """Return which of the prompts to train a group is; those of evaluations stand between them where more
        were asked for later."""
        return group - sum(each.evaluation is not None for each in self.prompts[:group])

    @property
    def staleness(self) -> int:
        """Updates between the weights that made its tokens and those that are trained with them."""
        return self.step - self.updates


class RequestedSteps(Generic[Group]):
    """The steps under way, oldest first. Invariant: all but the newest one are complete, unless steps are
    asked for early."""

    def __init__(self, max_staleness: int, num_steps: int, *, asks_early: bool = False) -> None:
        """`asks_early`: a step is asked for as soon as its staleness allows, while those before it are rolled
        out; in-flight updates are needed for that."""
        self._asks_early = asks_early
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        self._steps: dict[int, RequestedStep[Group]] = {}

    @property
    def newest(self) -> RequestedStep[Group]:
        """The step whose groups are arriving, or have arrived."""
        return self._steps[max(self._steps)]

    def get(self, step: int) -> RequestedStep[Group] | None:
        """Return a step, if it was requested."""
        return self._steps.get(step)

    def add(self, requested: RequestedStep[Group]) -> None:
        """Add the newest step."""
        assert requested.staleness <= self._max_staleness
        former = self._steps.values()
        assert all((each.is_complete or self._asks_early) and each.step < requested.step for each in former)
        self._steps[requested.step] = requested

    def remove(self, step: int) -> None:
        """Remove a step that was trained."""
        del self._steps[step]

    def next_ahead(self, training: int) -> int | None:
        """Return the step to request now, while step `training` is the oldest that is not trained."""
        if not (self.newest.is_complete or self._asks_early):
            return None
        following = self.newest.step + 1
        return (
            following if following < self._num_steps and following <= training + self._max_staleness else None
        )

    @property
    def open_from(self) -> int | None:
        """The oldest step that stays open when another one is asked for; None: none does."""
        return min(self._steps) if self._asks_early else None

    def versions(self) -> list[list[int]]:
        """Return [step, policy version, updates] of all: what a resumed trainer requests again."""
        return [[each.step, each.policy_version, each.updates] for each in self._steps.values()]


class GroupScorer:
    """Scores the groups of the steps under way.

    `start` is called on the stream's thread, the rest on the training thread.
    """

    def __init__(
        self,
        decode: Callable[[TokenIds], str],
        scorer: RewardScorer,
        algorithm: Algorithm,
        episodes: Callable[[int], list[EpisodeResult]] | None = None,
        environment: str = "",
        newest: Callable[[], int] = lambda: -1,
    ) -> None:
        """`episodes` returns those of a group of the step that was requested last, which are over, played by
        `environment`; None: there are none. `newest`: the version published last, for in-flight updates."""
        self._decode = decode
        self._episodes = episodes
        self._scorer = scorer
        self._watch = RewardWatch(scorer.name)
        self._episode_watch = EpisodeWatch(environment) if environment else None
        self._algorithm = algorithm
        self._newest = newest
        self._expected: dict[int, tuple[int, Sequence[Prompt]]] = {}
        """Policy version and prompts by step."""
        self.reward_wait_s = 0.0
        """Total seconds that `finish` has waited for rewards."""

    def expect(self, step: int, policy_version: int, prompts: Sequence[Prompt]) -> None:
        """Expect the groups of `step` from now on, and of steps before it that it does not make stale."""
        oldest = step - self._algorithm.max_staleness
        kept = {number: each for number, each in self._expected.items() if oldest <= number < step}
        self._expected = kept | {step: (policy_version, prompts)}

    def prompt_of(self, step: int, group: int) -> Prompt | None:
        """Return the prompt of a group of an expected step; None for any other. From any thread."""
        _, prompts = self._expected.get(step, (0, ()))
        return prompts[group] if 0 <= group < len(prompts) else None

    def start(self, group: DeliverGroupMessage) -> PendingGroup:
        """Check the group and start to score it. Raises `ProtocolError` for an invalid group."""
        step, where = group.step, f"group {group.group} of step {group.step}"
        if step not in self._expected:
            newest = max(self._expected, default=-1)
            raise ProtocolError(f"{where} came during step {newest}", "see the coordinator's log")
        version, prompts = self._expected[step]
        prompt = prompts[group.group]
        wanted = prompt.num_responses(self._algorithm.group_size)
        if self._episodes is not None:
            results = self._episodes(group.group)
            played = [self._start_episode(prompt, result) for result in results]
            return PendingGroup(step, group.group, prompt, played, results)
        if len(group.responses) != wanted:
            raise ProtocolError(
                f"{where} has {len(group.responses)} responses, not {wanted}", "see the coordinator's log"
            )
        tokens = [
            (np.frombuffer(each.token_ids, "<i4"), np.frombuffer(each.logprobs, "<f4"))
            for each in group.responses
        ]
        for response, (token_ids, logprobs) in zip(group.responses, tokens, strict=True):
            self._check(response, len(token_ids), len(logprobs), version, f"step {step}")
        asked = prompt.question or prompt.text
        calls = [RewardCall(asked, self._decode(token_ids), prompt.row) for token_ids, _ in tokens]
        rewards = self._scorer.submit_group(calls, prompt.reward)
        prompt_ids = np.array(prompt.token_ids, np.int32)
        responses = [
            _PendingResponse(
                (Sample(prompt_ids, token_ids, logprobs, 0.0),),
                response.finish_reason, _num_machines(response),
                sum(each.num_tokens for each in response.segments if each.policy_version != version), reward,
            )
            for response, (token_ids, logprobs), reward in zip(group.responses, tokens, rewards, strict=True)
        ]  # fmt: skip
        return PendingGroup(step, group.group, prompt, responses)

    def _check(
        self,
        response: FinishedResponse,
        num_tokens: int,
        num_logprobs: int,
        policy_version: int,
        where: str,
    ) -> None:
        """Raise `ProtocolError` for a response that is not whole, or has tokens of other versions than its
        step may have: they would be taken for newer, and train a lag that nobody asked for."""
        where = f"response {response.response} of {where}"
        if not num_tokens == num_logprobs == sum(segment.num_tokens for segment in response.segments):
            raise ProtocolError(
                f"{where}: {num_tokens} tokens, {num_logprobs} logprobs and segments of"
                f" {sum(segment.num_tokens for segment in response.segments)}",
                "see the coordinator's log",
            )
        newest = self._newest() if self._algorithm.in_flight_updates else policy_version
        versions = {segment.policy_version for segment in response.segments}
        wrong = sorted(version for version in versions if not policy_version <= version <= newest)
        if wrong:
            raise ProtocolError(
                f"{where}: tokens of policy versions {wrong} in a step of version {policy_version}",
                "see the coordinator's log",
            )

    def _start_episode(self, prompt: Prompt, result: EpisodeResult) -> _PendingResponse:
        record = result.record
        if result.failure:  # it was left out: nothing of it is trained or counted
            reward: Future[Reward] = Future()
            reward.set_result(Reward(0.0))
            return _PendingResponse((), str(FinishReason.QUARANTINED), 1, 0, reward)
        if result.reward is None:
            asked = prompt.question or prompt.text
            reward = self._scorer.submit(RewardCall(asked, record.last_response, prompt.row), prompt.reward)
        else:
            reward = Future()
            reward.set_result(Reward(result.reward))
        is_cut = record.is_cut or bool(record.limit)
        reason = str(FinishReason.LENGTH if is_cut else FinishReason.STOP)
        return _PendingResponse(tuple(map(_sample, record.samples)), reason, 1, 0, reward, result)

    def finish(self, pending: PendingGroup, between: Callable[[], None]) -> ScoredGroup:
        """Return the scored group; waits for its rewards, calling `between` now and then meanwhile.

        Raises `RuntimeFault` where the rewards show that the reward function is broken.
        """
        started = time.monotonic()
        futures = [entry.reward for entry in pending.responses]
        while wait(futures, timeout=_RECALL_CHECK_S).not_done:
            between()
        self.reward_wait_s += time.monotonic() - started
        self._watch.saw(future.result() for future in futures)
        if self._episode_watch is not None:
            self._episode_watch.saw(pending.episodes)
        return score_group(pending, self._algorithm)


def _sample(recorded: RecordedSample) -> Sample:
    """Return a sample of an episode without its advantage."""
    logprobs = np.frombuffer(recorded.logprobs, "<f4")
    sampled = np.frombuffer(recorded.sampled, np.uint8).astype(bool)
    prompt_ids, token_ids = (np.frombuffer(each, "<i4") for each in (recorded.prompt_ids, recorded.token_ids))
    return Sample(prompt_ids, token_ids, logprobs, 0.0, sampled=sampled)


def _num_machines(response: FinishedResponse) -> int:
    """Return how many machines in a row made it: a segment may also end because the version changed."""
    instances = [segment.instance for segment in response.segments]
    return len(instances[:1]) + sum(before != after for before, after in pairwise(instances))


def score_group(pending: PendingGroup, algorithm: Algorithm) -> ScoredGroup:
    """Return the group with its advantages; all its rewards are there."""
    decoded = pending.responses
    rewards = [entry.reward.result() for entry in decoded]
    usable = [entry.is_usable for entry in decoded]
    kl = algorithm.kl
    is_per_token = algorithm.critic is not None  # ppo takes the KL off each token's reward
    kl_coef = kl.coef if kl is not None and kl.is_in_reward and not is_per_token else 0.0
    shaped = [
        reward.value
        + overlong_penalty(entry.num_tokens, algorithm.max_response_tokens, algorithm.overlong_penalty_tokens)
        - (kl_coef * entry.kl(kl.estimator) if kl is not None and kl_coef else 0.0)
        for reward, entry in zip(rewards, decoded, strict=True)
    ]
    trained = [
        ok and not (algorithm.mask_truncated and entry.finish_reason == FinishReason.LENGTH)
        for ok, entry in zip(usable, decoded, strict=True)
    ]
    if algorithm.loss in WITHOUT_RATIO:
        some = [ok and entry.num_tokens > 0 for ok, entry in zip(trained, decoded, strict=True)]
        advantages = chosen_responses(shaped, some, algorithm)
        trained = [sign != 0 for sign in advantages]
    elif algorithm.critic is not None:
        advantages = [0.0] * len(shaped)  # the critic's follow from all responses of the step
    else:
        advantages = group_advantages(
            torch.tensor([shaped], dtype=torch.float64), torch.tensor([usable]), algorithm.loss
        )[0].tolist()
    scored = [
        tuple(replace(s, advantage=advantages[i], usable=trained[i], reward=shaped[i]) for s in entry.samples)
        for i, entry in enumerate(decoded)
    ]
    plain = [reward.value for reward, ok in zip(rewards, usable, strict=True) if ok]
    is_flat = len(plain) < 2 or max(plain) - min(plain) <= 1e-9
    if algorithm.advantage_level == "turn":
        scored = _by_turn(scored, decoded, shaped, usable, algorithm)
        earned = [
            _turn_rewards(each.episode, reward.value) for each, reward in zip(decoded, rewards, strict=True)
        ]
        is_flat = len(plain) < 2 or are_flat(
            [returns(own) for own, ok in zip(earned, usable, strict=True) if ok]
        )
    return ScoredGroup(
        pending.group,
        tuple(
            ScoredResponse(
                scored[i],
                rewards[i],
                entry.finish_reason,
                entry.num_segments,
                entry.newer_tokens,
                entry.is_finite,
            )
            for i, entry in enumerate(decoded)
        ),
        len(decoded) > 1 and is_flat,
        pending.episodes,
    )


def _by_turn(
    scored: Sequence[tuple[Sample, ...]],
    responses: Sequence[_PendingResponse],
    shaped: Sequence[float],
    usable: Sequence[bool],
    algorithm: Algorithm,
) -> list[tuple[Sample, ...]]:
    """Return the samples with what each turn is credited with: advantages, or rewards where there is a
    critic. `shaped`: rewards of whole episodes with the penalties, which their last turns pay."""
    earned = [_turn_rewards(each.episode, reward) for each, reward in zip(responses, shaped, strict=True)]
    advantages = turn_advantages([returns(own) for own in earned], usable, algorithm.loss)
    found = []
    for samples, response, own, of_turns in zip(scored, responses, earned, advantages, strict=True):
        recorded = () if response.episode is None else response.episode.record.samples
        found.append(
            tuple(
                replace(sample, rewards=at_turns_ends(each, own))
                if algorithm.critic is not None
                else replace(sample, advantages=per_token(each, of_turns))
                for sample, each in zip(samples, recorded, strict=True)
            )
        )
    return found


def _turn_rewards(episode: EpisodeResult | None, reward: float) -> list[float]:
    """Return what each turn of an episode has earned, in all `reward`: what its environment does not give to
    one, the last has earned."""
    if episode is None or not episode.num_responses:
        return []
    given = episode.rewards or ()
    found = [*given, *[0.0] * (episode.num_responses - len(given))]
    found[-1] += reward - sum(given)
    return found
