"""What an environment wrote is read by the policy and never trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rlboost_runtime.inference.episodes import EpisodeRecord, RecordedSample
from rlboost_runtime.job import Algorithm, Ppo, TinyModel
from rlboost_runtime.protocol.episode_failures import EpisodeFailure
from rlboost_runtime.protocol.messages import DeliverGroupMessage
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.episodes.outcome import NOTHING, EpisodeResult
from rlboost_runtime.trainer.episodes.results import EpisodeFiles, StepKey
from rlboost_runtime.trainer.learn.companions import judged
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from rlboost_runtime.trainer.rewards.scorer import RewardScorer
from rlboost_runtime.trainer.rollout.groups import GroupScorer
from rlboost_runtime.trainer.rollout.metrics import group_metrics
from rlboost_runtime.trainer.rollout.turn_rewards import turn_advantages

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, FIRST, TOLD, SECOND = [1, 2, 3], [10, 11], [20, 21, 22], [12, 13, 14]
ALGORITHM = Algorithm(loss="dapo", importance_sampling="none", dual_clip=None, group_size=2)


def episode(advantage: float = 0.7) -> Sample:
    """Two turns as one sample."""
    ids = [*FIRST, *TOLD, *SECOND]
    logprobs = [-5.0] * 2 + [0.0] * 3 + [-5.0] * 3
    sampled = np.array([True] * 2 + [False] * 3 + [True] * 3)
    return replace(Sample.of(PROMPT, ids, logprobs, advantage), sampled=sampled)


def turns(advantage: float = 0.7) -> list[Sample]:
    """The same as two samples, each after what it was sampled after."""
    second = [*PROMPT, *FIRST, *TOLD]
    return [
        Sample.of(PROMPT, FIRST, [-5.0] * 2, advantage),
        Sample.of(second, SECOND, [-5.0] * 3, advantage),
    ]


def gradient(samples: list[Sample]) -> tuple[torch.Tensor, float]:
    policy = Policy(make_model(TinyModel(init="tiny", hidden_size=32, num_layers=1), 64), make_tokenizer())
    learner = Learner(policy, ALGORITHM)
    learner.begin_step(0)
    learner.accumulate(samples)
    found = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
    return found / learner.divisor, learner.divisor


def test_the_gradient_is_that_of_what_was_sampled_alone() -> None:
    whole, tokens = gradient([episode()])
    apart, apart_tokens = gradient(turns())
    assert tokens == apart_tokens == 5, "tokens of the environment do not count"
    assert (whole - apart).norm() <= 1e-5 * apart.norm()
    unmasked, _ = gradient([replace(episode(), sampled=None)])
    assert (unmasked - apart).norm() > 0.1 * apart.norm()


def recorded(sample: Sample) -> RecordedSample:
    sampled = np.ones(len(sample.token_ids), bool) if sample.sampled is None else sample.sampled
    return RecordedSample(
        sample.prompt_ids.tobytes(), sample.token_ids.tobytes(), sample.logprobs.tobytes(),
        sampled.astype(np.uint8).tobytes(),
    )  # fmt: skip


def result(
    samples: list[Sample], reward: float | None, limit: str = "", rewards: tuple[float, ...] | None = None
) -> EpisodeResult:
    """`episode()` has two turns in one sample, `turns()` has two samples."""
    begins = [[0, len(FIRST) + len(TOLD)]] if len(samples) == 1 else [[0], [0]]
    numbers = iter(range(9))
    records = tuple(
        msgspec.structs.replace(recorded(sample), turns=tuple((next(numbers), at) for at in own))
        for sample, own in zip(samples, begins, strict=True)
    )
    record = EpisodeRecord(records, len(samples), (0,), limit, False, "", "last words")
    return EpisodeResult(record, reward, rewards=rewards)


def scored(results: list[EpisodeResult], folder: Path, algorithm: Algorithm):
    (folder / "r.py").write_text("def length(response):\n    return len(response) / 10\n")
    log = folder / "log"
    with RewardScorer("r.py:length", folder, timeout_s=20, log_file=log) as scorer:
        groups = GroupScorer(str, scorer, algorithm, lambda group: results, "env.py:Env")
        groups.expect(0, 0, [Prompt(0, "p", tuple(PROMPT), {})])
        return groups.finish(groups.start(DeliverGroupMessage(0, 0, ())), lambda: None)


def test_samples_of_an_episode_share_its_advantage_and_one_without_reward_is_scored(tmp_path: Path) -> None:
    algorithm = ALGORITHM.model_copy(update={"group_size": 3})
    results = [result([episode()], 1.0), result(turns(), 0.0), result([episode()], None, "turns")]
    group = scored(results, tmp_path, algorithm)
    rewards = [response.reward.value for response in group.responses]
    assert rewards == pytest.approx([1.0, 0.0, 1.0]), "the job's reward has scored the last response"
    first, second, third = group.responses
    assert [sample.advantage for sample in second.samples] == [second.samples[0].advantage] * 2
    assert second.samples[0].advantage < 0 < first.samples[0].advantage
    assert [response.num_tokens for response in group.responses] == [5, 5, 5]
    assert [response.finish_reason for response in group.responses] == ["stop", "stop", "length"]
    assert third.samples[0].sampled is not None
    found = group_metrics([group])
    assert (found["turns_mean"], found["samples_per_episode"]) == (4 / 3, 4 / 3)
    assert (found["environment_tokens_mean"], found["episodes_limited_share"]) == (2.0, 1 / 3)
    assert found["length_mean"] == 5


BY_TURN = {"group_size": 2, "advantage_level": "turn", "loss": "dr_grpo"}
OF_FIRST, OF_SECOND = slice(0, 2), slice(5, 8)


def samples_of(results: list[EpisodeResult], folder: Path, algorithm: Algorithm) -> list[Sample]:
    """The samples of a whole episode and of one in two samples, in order."""
    return [s for response in scored(results, folder, algorithm).responses for s in response.samples]


def advantages_of(sample: Sample) -> list[float]:
    assert sample.advantages is not None
    assert len(sample.advantages) == len(sample.token_ids)
    return list(sample.advantages.tolist())


def test_each_turn_is_credited_with_what_is_earned_from_it_on(tmp_path: Path) -> None:
    algorithm = ALGORITHM.model_copy(update=BY_TURN)
    results = [result([episode()], 3.0, rewards=(2.0, 1.0)), result(turns(), 3.0, rewards=(0.0, 3.0))]
    whole, first, second = samples_of(results, tmp_path, algorithm)
    assert advantages_of(whole)[OF_FIRST] == [0.0, 0.0], "3 against 3 from the first turn on"
    assert advantages_of(whole)[OF_SECOND] == [-1.0] * 3, "1 against 3 from the second"
    assert advantages_of(first) == [0.0, 0.0]
    assert advantages_of(second) == [1.0] * 3
    group = scored(results, tmp_path, algorithm)
    assert not group.zero_variance, "the episodes earned the same, their turns did not"
    same = [result([episode()], 3.0, rewards=(2.0, 1.0)), result(turns(), 3.0, rewards=(2.0, 1.0))]
    assert scored(same, tmp_path, algorithm).zero_variance


def test_a_reward_for_the_episode_alone_is_its_last_turns(tmp_path: Path) -> None:
    algorithm = ALGORITHM.model_copy(update=BY_TURN)
    whole, first, second = samples_of([result([episode()], 1.0), result(turns(), 0.0)], tmp_path, algorithm)
    assert advantages_of(whole)[OF_FIRST] == [0.5, 0.5]
    assert advantages_of(whole)[OF_SECOND] == [0.5] * 3
    assert advantages_of(first) == [-0.5] * 2
    assert advantages_of(second) == [-0.5] * 3


def test_the_gradient_of_turns_is_that_of_samples_with_their_own_advantages() -> None:
    table = np.zeros(8, np.float32)
    table[OF_FIRST], table[OF_SECOND] = 0.3, -0.9
    whole, _ = gradient([replace(episode(), advantages=table)])
    first, second = turns()
    apart, _ = gradient([replace(first, advantage=0.3), replace(second, advantage=-0.9)])
    assert (whole - apart).norm() <= 1e-5 * apart.norm()


def test_a_critic_is_given_each_turns_reward_at_its_end(tmp_path: Path) -> None:
    algorithm = Algorithm(loss="ppo", advantage_level="turn", group_size=2, ppo=Ppo(gae_lambda=0.5))
    results = [result([episode()], 3.0, rewards=(2.0, 1.0)), result(turns(), 5.0, rewards=(1.0, 4.0))]
    whole, first, second = samples_of(results, tmp_path, algorithm)
    assert [None if s.rewards is None else s.rewards.tolist() for s in (whole, first, second)] == [
        [0, 2, 0, 0, 0, 0, 0, 1],
        [0, 5],  # what its later turns earn lies in another sample
        [0, 0, 4],
    ]
    values = np.zeros(8, np.float32)
    (by_turn,), _ = judged([replace(whole, values=values)], algorithm)
    (at_end,), _ = judged([replace(whole, rewards=None, reward=3.0, values=values)], algorithm)
    assert by_turn.returns is not None
    assert at_end.returns is not None
    assert by_turn.returns[:2].tolist() == [2 * 0.5 + 0.5**4, 2 + 0.5**3]
    assert at_end.returns[:2].tolist() == [3 * 0.5**4, 3 * 0.5**3]


def test_a_turn_that_one_episode_alone_reached_is_not_compared() -> None:
    found = turn_advantages([[3.0, 1.0], [1.0], [2.0]], [True, True, True], "dr_grpo")
    assert found == [[1.0, 0.0], [-1.0], [0.0]]
    assert turn_advantages([[3.0], [1.0], [9.0]], [True, True, False], "dr_grpo") == [[1.0], [-1.0], [0.0]]
    assert turn_advantages([[], []], [True, True], "grpo") == [[], []]


def test_an_episode_that_was_left_out_is_no_reward_of_0(tmp_path: Path) -> None:
    algorithm = ALGORITHM.model_copy(update={"group_size": 3})
    left_out = EpisodeResult(NOTHING, None, str(EpisodeFailure.TIMEOUT), "slow", 3)
    group = scored([result([episode()], 0.8), left_out, result([episode()], 0.4)], tmp_path, algorithm)
    alone = scored(
        [result([episode()], 0.8), result([episode()], 0.4)], tmp_path,
        ALGORITHM.model_copy(update={"group_size": 2}),
    )  # fmt: skip
    assert group.responses[1].samples == ()
    kept = [group.responses[0], group.responses[2]]
    assert [r.samples[0].advantage for r in kept] == [r.samples[0].advantage for r in alone.responses]
    found = group_metrics([group])
    assert found["reward_mean"] == pytest.approx(0.6)
    assert (found["episodes_left_out_timeout"], found["episodes_tried_again"]) == (1, 2)


def read(folder: Path, key: StepKey) -> dict[int, EpisodeResult]:
    files = EpisodeFiles(folder)
    found = files.begin(key)
    files.close()
    return found


def test_an_episode_on_disk_is_read_back_whole_or_not_at_all(tmp_path: Path) -> None:
    key, one, two = StepKey(3, 1, "d"), result([episode()], 1.0), result(turns(), None)
    files = EpisodeFiles(tmp_path)
    assert files.begin(key) == {}
    files.add(4, one)
    files.add(7, two)
    files.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert read(tmp_path, key) == {4: one, 7: two}
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = read(tmp_path, key)
        assert found in ({}, {4: one})
    flipped = bytearray(whole)
    flipped[-3] ^= 1
    path.write_bytes(flipped)
    files = EpisodeFiles(tmp_path)
    assert files.begin(key) == {4: one}
    files.add(7, two)
    files.close()
    assert read(tmp_path, key) == {4: one, 7: two}
    assert read(tmp_path, StepKey(3, 2, "d")) == {}, "episodes of other weights do not count"
