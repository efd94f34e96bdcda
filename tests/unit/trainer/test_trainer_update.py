"""Mini-batches of the learner, groups into samples, step metrics and checkpoints."""

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.job import Algorithm, Kl, TinyModel, Trainer
from rlboost_runtime.protocol.messages import DeliverGroupMessage, FinishedResponse, Segment
from rlboost_runtime.protocol.reward_failures import RewardFailure
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import TrainedState, TrainingState
from rlboost_runtime.trainer.data.prompts import Prompt
from rlboost_runtime.trainer.learn.learner import Learner, Sample
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.loop import micro_batch_sizes
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from rlboost_runtime.trainer.rewards.outcome import Reward
from rlboost_runtime.trainer.rewards.scorer import RewardCall
from rlboost_runtime.trainer.rollout.groups import GroupScorer, ScoredGroup, score_group
from rlboost_runtime.trainer.rollout.metrics import MetricsLog, group_metrics, newer_tokens, percentile

pytestmark = pytest.mark.usefixtures("one_thread")

ALGORITHM = Algorithm(
    group_size=2, prompts_per_step=2, learning_rate=1e-3, learning_rate_warmup_steps=2, max_response_tokens=8,
    overlong_penalty_tokens=4,
)  # fmt: skip


def learner(**changes) -> Learner:
    model = make_model(TinyModel(init="tiny", hidden_size=32, num_layers=1), 64)
    return Learner(Policy(model, make_tokenizer()), ALGORITHM.model_copy(update=changes))


def samples(num: int = 12) -> list[Sample]:
    draw = np.random.default_rng(0)
    found = []
    for _ in range(num):
        n, m = int(draw.integers(1, 6)), int(draw.integers(1, 9))
        found.append(
            Sample.of(
                draw.integers(0, 256, m).tolist(), draw.integers(0, 256, n).tolist(),
                draw.normal(-5.5, 0.2, n).tolist(), float(draw.normal()),
            )
        )  # fmt: skip
    return found


def gradient(batches: list[list[Sample]], **changes) -> torch.Tensor:
    """The divided gradient of one mini-batch: AdamW's first step would hide its size."""
    subject = learner(**changes)
    subject.begin_step(5)
    for batch in batches:
        subject.accumulate(batch)
    for parameter in subject.policy.model.parameters():
        parameter.grad.div_(subject.divisor)
    return torch.cat([p.grad.flatten() for p in subject.policy.model.parameters()])


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_micro_batches_in_any_order_equal_the_full_batch(loss):
    found = samples()
    whole = gradient([found], loss=loss, micro_batch_responses=99)
    for batches in ([found[7:], found[:2], found[2:7]], [found[::-1]]):
        split = gradient(batches, loss=loss, micro_batch_responses=3)
        assert (split - whole).norm() <= 1e-5 * whole.norm()


def test_the_same_micro_batches_give_the_same_bits():
    found = samples()
    one, again = (gradient([found[:5], found[5:]], micro_batch_responses=4) for _ in range(2))
    assert torch.equal(one, again)


def test_quarantined_samples_change_nothing():
    found = samples(4)
    masked = [
        *found,
        Sample.of([1], [2, 3], [-1.0, float("nan")], 5.0, usable=False),
        Sample.of([1], [], [], 1.0),
    ]
    torch.testing.assert_close(gradient([masked]), gradient([found]))


def test_a_minibatch_without_anything_usable_is_skipped_and_counted():
    subject = learner()
    before = [p.detach().clone() for p in subject.policy.model.parameters()]
    subject.begin_step(0)
    subject.accumulate([Sample.of([1], [2], [-1.0], 1.0, usable=False)])
    subject.apply()
    assert subject.sums.metrics()["minibatches_empty"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, subject.policy.model.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_never_reaches_the_weights():
    subject = learner()
    subject.begin_step(0)
    subject.accumulate([Sample.of([1], [2], [-1.0], float("nan"))])
    subject.apply()
    assert subject.sums.metrics()["minibatches_not_finite"] == 1
    assert all(torch.isfinite(p).all() for p in subject.policy.model.parameters())


def test_learning_rate_ramp():
    subject = learner()
    assert [subject.learning_rate(step) for step in range(3)] == [0.5e-3, 1e-3, 1e-3]
    assert learner(learning_rate_warmup_steps=0).learning_rate(0) == 1e-3


def test_training_raises_the_probability_of_better_responses():
    subject = learner()
    good, bad = [10, 11, 12], [20, 21]

    def logprob(tokens: list[int]) -> float:
        return subject.policy.forward([[1, 2]], [tokens], 1.0).logprobs.sum().item()

    before = logprob(good), logprob(bad)
    for step in range(3):
        subject.begin_step(step)
        mu = [subject.policy.forward([[1, 2]], [t], 1.0).logprobs[0].detach().tolist() for t in (good, bad)]
        subject.accumulate([Sample.of([1, 2], good, mu[0], 1.0), Sample.of([1, 2], bad, mu[1], -1.0)])
        subject.apply()
    assert logprob(good) > before[0]
    assert logprob(bad) < before[1]


def test_mismatch_is_measured_before_the_first_update_only():
    subject = learner()
    subject.begin_step(0)
    subject.accumulate(samples(2))
    subject.apply()
    tokens = subject.sums.mismatch.tokens
    subject.accumulate(samples(2))
    subject.apply()
    assert subject.sums.mismatch.tokens == tokens > 0
    assert subject.sums.tokens == 2 * tokens


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((16, 4, 8, 16), [2, 2, 0] * 4),
        ((6, 2, 8, 16), [2, 1, 0, 2, 1, 0]),
        ((4, 1, 8, 1), [1, 1, 1, 1, 0]),
        ((4, 2, 8, 1000), [2, 0, 2, 0]),
    ],
)
def test_micro_batch_sizes(arguments, sizes):
    assert list(micro_batch_sizes(*arguments)) == sizes


# --- groups ---------------------------------------------------------------------------------------------


class Scorer:
    """Scores by length; a response that begins with "!" fails."""

    name = "rewards.py:score"

    def submit_group(self, calls: list[RewardCall], reward: str | None = None) -> list[Future[Reward]]:
        return [self._submit(call) for call in calls]

    def _submit(self, call: RewardCall) -> Future[Reward]:
        future: Future[Reward] = Future()
        failed = call.response.startswith("!")
        future.set_result(
            Reward(0.0, RewardFailure.RAISED, "boom") if failed else Reward(float(len(call.response)))
        )
        return future


def scorer(group_size: int = 2) -> GroupScorer:
    subject = GroupScorer(
        lambda ids: "".join(map(chr, ids)), Scorer(), ALGORITHM.model_copy(update={"group_size": group_size})
    )
    subject.expect(3, 9, [Prompt(0, "p", (1, 2), {}), Prompt(1, "q", (3,), {})])
    return subject


def scored(subject: GroupScorer, group: DeliverGroupMessage) -> ScoredGroup:
    return subject.finish(subject.start(group), lambda: None)


def response(text: str, reason: str = "stop", version: int = 9, logprobs: list[float] | None = None):
    values = [-1.0] * len(text) if logprobs is None else logprobs
    return FinishedResponse(
        0, np.array([ord(c) for c in text], "<i4").tobytes(), np.array(values, "<f4").tobytes(),
        (Segment("i", version, len(text)),), reason,
    )  # fmt: skip


def test_a_group_becomes_samples_with_the_overlong_term_in_the_advantage_only():
    subject = scorer(3)
    group = scored(
        subject, DeliverGroupMessage(3, 0, (response("ab"), response("abcdefgh", "length"), response("abc")))
    )  # fmt: skip
    assert [r.reward.value for r in group.responses] == [2, 8, 3]  # as scored; shaped: 2, 8 - 1, 3
    shaped = np.array([2.0, 7.0, 3.0])
    expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    assert [r.samples[0].advantage for r in group.responses] == pytest.approx(expected.tolist(), rel=1e-5)
    assert group.responses[0].samples[0].prompt_ids.tolist() == [1, 2]
    metrics = group_metrics([group])
    assert metrics["reward_mean"] == pytest.approx(13 / 3)
    assert metrics["truncated_share"] == pytest.approx(1 / 3)
    assert (metrics["length_p50"], metrics["length_max"]) == (3, 8)


def test_quarantined_and_broken_responses_are_masked_out():
    subject = scorer(4)
    broken = response("ab", logprobs=[-1.0, float("nan")])
    responses = (response("a"), response("abcd"), response("abcdef", "quarantined"), broken)
    group = scored(subject, DeliverGroupMessage(3, 1, responses))
    assert [r.samples[0].usable for r in group.responses] == [True, True, False, False]
    advantages = [r.samples[0].advantage for r in group.responses]
    assert advantages[0] == pytest.approx(-advantages[1])
    assert advantages[2:] == [0, 0]
    metrics = group_metrics([group])
    assert metrics["quarantined_share"] == metrics["not_finite_share"] == 0.25


def test_failed_rewards_count_as_zero_and_equal_rewards_teach_nothing():
    subject = scorer()
    group = scored(subject, DeliverGroupMessage(3, 0, (response("!x"), response("!y"))))
    assert group.zero_variance
    metrics = group_metrics([group])
    assert (metrics["reward_failures_raised"], metrics["zero_variance_share"]) == (2, 1)


def test_zero_variance_is_judged_before_the_penalty_for_length():
    group = scored(scorer(), DeliverGroupMessage(3, 0, (response("!x"), response("!abcdefg", "length"))))
    assert group.zero_variance
    assert group.responses[1].samples[0].advantage < 0 < group.responses[0].samples[0].advantage


def test_kl_in_the_reward_is_subtracted_before_the_advantages():
    algorithm = ALGORITHM.model_copy(update={"kl": Kl(**{"in": "reward", "coef": 0.5, "estimator": "k1"})})
    pending = scorer().start(DeliverGroupMessage(3, 0, (response("ab"), response("abc"))))
    reference = [np.array([-2.0, -1.5], "f4"), np.array([-1.0, -1.0, -4.0], "f4")]
    samples = iter(
        [replace(s, reference_logprobs=r) for s, r in zip(pending.samples(), reference, strict=True)]
    )
    group = score_group(pending.with_samples(samples), algorithm)
    shaped = np.array([2 - 0.5 * (1 + 0.5), 3 - 0.5 * 3])  # log pi - log pi_ref, summed over tokens
    expected = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    assert [r.samples[0].advantage for r in group.responses] == pytest.approx(expected.tolist(), rel=1e-5)
    assert [r.reward.value for r in group.responses] == [2, 3]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ((response("a"),), "has 1 responses, not 2"),
        ((response("a"), response("b", version=8)), r"versions \[8\] in a step of version 9"),
        ((response("a"), response("b", logprobs=[])), "1 tokens, 0 logprobs"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(bad, told):
    with pytest.raises(ProtocolError, match=told):
        scorer().start(DeliverGroupMessage(3, 0, bad))


def in_flight(*versions: int) -> ScoredGroup:
    """Two responses of three tokens per version, where 11 is the version published last."""
    settings = {"group_size": 2, "max_staleness": 1, "in_flight_updates": True}
    subject = GroupScorer(lambda ids: "", Scorer(), ALGORITHM.model_copy(update=settings), newest=lambda: 11)
    subject.expect(3, 9, [Prompt(0, "p", (1, 2), {}), Prompt(1, "q", (3,), {})])
    whole = response("abc" * len(versions))
    segments = tuple(Segment("i", version, 3) for version in versions)
    both = (msgspec.structs.replace(whole, segments=segments), whole)
    return scored(subject, DeliverGroupMessage(3, 0, both))


def test_with_in_flight_updates_a_response_has_tokens_of_several_versions():
    group = in_flight(9, 10, 11)
    assert [each.newer_tokens for each in group.responses] == [6, 0]
    assert [each.num_segments for each in group.responses] == [1, 1], "it was not migrated"
    assert newer_tokens([group]) == {"newer_tokens_share": 6 / 18}
    assert in_flight(10).responses[0].newer_tokens == 3


@pytest.mark.parametrize("versions", [(8, 9), (9, 12)])
def test_versions_older_than_asked_or_not_published_are_refused(versions):
    with pytest.raises(ProtocolError, match="in a step of version 9"):
        in_flight(*versions)


def test_groups_of_another_step_are_refused():
    with pytest.raises(ProtocolError, match="of step 2 came during step 3"):
        scorer().start(DeliverGroupMessage(2, 0, ()))


def test_percentiles():
    assert [percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], p) for p in (10, 50, 90, 100)] == [1, 5, 9, 10]
    assert percentile([7], 10) == 7


# --- files ----------------------------------------------------------------------------------------------


def test_the_metrics_file_rewinds_and_drops_a_torn_line(tmp_path):
    table = MetricsLog(tmp_path / "metrics.jsonl")
    assert table.rewind(5) is None
    for step in range(4):
        table.append({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert table.rewind(3) == 2
    table.append({"step": 3})
    assert [json.loads(x)["step"] for x in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
        3,
    ]


def state(step: int) -> TrainedState:
    return TrainedState(step, step + 1, 0.5, 1.5, 10, 0.25, {"step": float(step)})


def trained_twice(subject: Learner, start: int) -> None:
    for step in (start, start + 1):
        subject.begin_step(step)
        subject.accumulate(samples())
        subject.apply()


def resumed(folder: Path, algorithm: Algorithm) -> Learner:
    policy = Policy.load(folder)
    policy.set_up(Trainer(), algorithm)
    found = Learner(policy, algorithm)
    TrainingState(found).restore(folder)
    return found


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    policy = learner().policy
    policy.set_up(Trainer(), ALGORITHM)  # as the trainer does: it chooses the kernels
    straight = Learner(policy, ALGORITHM)
    trained_twice(straight, 0)
    taken = TrainingState(straight).take(tmp_path)
    trained_twice(straight, 2)  # what is written later is what was there then
    checkpoint.write(tmp_path, taken, state(1), keep=2)

    folder = step_folder(tmp_path, saved_steps(tmp_path)[-1])
    again = resumed(folder, ALGORITHM)
    assert checkpoint.read_state(folder) == state(1)
    trained_twice(again, 2)
    pairs = zip(straight.policy.model.parameters(), again.policy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_fork_trains_with_its_own_hyperparameters(tmp_path):
    parent = learner()
    trained_twice(parent, 0)
    folder = checkpoint.write(tmp_path, TrainingState(parent).take(tmp_path), state(1), keep=1)
    changed = ALGORITHM.model_copy(update={"adam_betas": [0.5, 0.6], "adam_eps": 1e-3})
    fork = resumed(folder, changed)
    assert {(group["betas"], group["eps"]) for group in fork.optimizer.param_groups} == {((0.5, 0.6), 1e-3)}
    moments = [each["exp_avg"] for each in parent.optimizer.state.values()]
    restored = [each["exp_avg"] for each in fork.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, restored, strict=True))


def test_only_the_newest_checkpoints_stay_and_a_torn_one_is_never_seen(tmp_path):
    subject = learner()
    for step in range(4):
        checkpoint.write(tmp_path, TrainingState(subject).take(tmp_path), state(step), keep=2)
    assert saved_steps(tmp_path) == [2, 3]

    def torn(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.replace_folder(step_folder(tmp_path, 4), torn)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
