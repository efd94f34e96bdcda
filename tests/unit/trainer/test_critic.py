"""PPO's advantages, value loss and whole update against OpenRLHF's formulas, written out here.

Its sources, at commit 3c3be62 of August 2026: the experience maker (`get_advantages_and_returns`,
`compute_advantages_and_returns`) and, of its models, utils (`compute_reward`, `compute_approx_kl`) and losses
(`PolicyLoss`, `ValueLoss`, `aggregate_loss`).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlboost_runtime.job import Algorithm, Kl, Lora, Ppo, TinyModel, Trainer
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import TrainedState, TrainingState
from rlboost_runtime.trainer.learn.companions import Critic, Reference, judged
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.logprobs import VALUE_HEAD
from rlboost_runtime.trainer.learn.losses import gae, value_loss
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.learn.sharded_state import CRITIC
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TinyModel(init="tiny", hidden_size=32, num_layers=1)
KL = Kl(coef=0.2, estimator="k1", **{"in": "reward"})
SETTINGS = Ppo(learning_rate=3e-3, gamma=0.97, gae_lambda=0.9, value_clip=0.05)


def algorithm_of(**changes: Any) -> Algorithm:
    fields = {
        "loss": "ppo", "ppo": SETTINGS, "kl": KL, "learning_rate": 1e-3, "learning_rate_warmup_steps": 0,
        "dual_clip": None, "importance_sampling": "none", "max_response_tokens": 8, "minibatches_per_step": 2,
        "grad_clip": 1e9,
    }  # fmt: skip
    return Algorithm(**fields | changes)


def policy_of(seed: int = 0) -> Policy:
    return Policy(make_model(TINY.model_copy(update={"seed": seed}), 64), make_tokenizer())


def samples(num: int = 8) -> list[Sample]:
    draw, found = np.random.default_rng(5), []
    for i in range(num):
        n, m = int(draw.integers(1, 8)), int(draw.integers(1, 6))
        prompt, tokens = draw.integers(0, 256, m).tolist(), draw.integers(0, 256, n).tolist()
        made = Sample.of(prompt, tokens, draw.normal(-5.5, 0.2, n).tolist(), 0.0, usable=i != 3)
        found.append(replace(made, reward=float(draw.normal())))
    return found


# --- OpenRLHF's formulas, on padded rows --------------------------------------------------------------------


def their_rewards(reward_B: Tensor, kl_coef: float, kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`compute_reward`: -coef x KL of each token, and the reward at the last token of the mask."""
    last_B1 = mask_BT.size(1) - 1 - mask_BT.long().fliplr().argmax(dim=1, keepdim=True)
    return torch.zeros_like(kl_BT).scatter_(1, last_B1, reward_B.unsqueeze(1)) - kl_coef * kl_BT


def their_gae(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`get_advantages_and_returns`: a loop from the last column, over values and rewards times the mask."""
    values, rewards = mask * values, mask * rewards
    last: Tensor | float = 0.0
    backward = []
    for t in reversed(range(rewards.size(1))):
        after = values[:, t + 1] if t < rewards.size(1) - 1 else 0.0
        last = rewards[:, t] + gamma * after - values[:, t] + gamma * lam * last
        backward.append(last)
    advantages = torch.stack(backward[::-1], dim=1)  # type: ignore[arg-type]
    return advantages, advantages + values


def their_whitening(advantages: Tensor, mask: Tensor) -> Tensor:
    """`compute_advantages_and_returns`, "Normalize advantages across all experiences"."""
    mean = (advantages * mask).sum() / mask.sum()
    variance = ((advantages - mean).pow(2) * mask).sum() / mask.sum()
    return (advantages - mean) * variance.clamp(min=1e-8).rsqrt()


def their_value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """`ValueLoss`: half the masked mean of the larger square."""
    bounded = old + (values - old).clamp(-clip, clip)
    larger = torch.max((bounded - returns) ** 2, (values - returns) ** 2)
    return 0.5 * (larger * mask).sum() / mask.sum()


def their_policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """`PolicyLoss` with clips of 0.2, no dual clip and no correction; masked mean over tokens."""
    ratio = (logprobs - old).clamp(-20.0, 20.0).exp()
    terms = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (terms * mask).sum() / mask.sum()


# --- small --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.97, 0.0)])
def test_gae_is_openrlhf_s(gamma: float, lam: float) -> None:
    draw = np.random.default_rng(1)
    rewards, values = draw.normal(size=(5, 9)), draw.normal(size=(5, 9))
    chosen = np.arange(9) < draw.integers(1, 10, 5)[:, None]
    found = gae(rewards, values, chosen, gamma, lam)
    wanted = their_gae(
        *(torch.from_numpy(each) for each in (values, rewards, chosen.astype(float))), gamma, lam
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs.numpy() * chosen, abs=1e-12)


def test_tokens_of_an_environment_are_passed_over() -> None:
    """The same tokens without them have the same advantages."""
    draw = np.random.default_rng(2)
    rewards, values = draw.normal(size=(1, 4)), draw.normal(size=(1, 4))
    wanted = gae(rewards, values, np.ones((1, 4), bool), 0.9, 0.8)
    chosen = np.array([[True, True, False, False, True, False, True]])
    wide = [np.full((1, 7), 9.0) for _ in range(2)]
    for each, narrow in zip(wide, (rewards, values), strict=True):
        each[chosen] = narrow[0]
    found = gae(wide[0], wide[1], chosen, 0.9, 0.8)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[chosen] == pytest.approx(theirs[0])
        assert (mine[~chosen] == 0).all()


def test_value_loss_is_openrlhf_s() -> None:
    draw = torch.Generator().manual_seed(3)
    values, old, returns = (torch.randn(4, 6, generator=draw) for _ in range(3))
    mask = (torch.arange(6) < torch.tensor([[6], [2], [0], [4]])).float()
    for clip in (0.05, 0.5, 10.0):
        mine, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
        found, clipped = value_loss(mine, old, returns, mask, clip)
        wanted = their_value_loss(theirs, old, returns, mask, clip)
        (found / mask.sum()).backward()
        wanted.backward()
        assert found.item() / 12 == pytest.approx(wanted.item(), rel=1e-6)
        assert mine.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-7)  # type: ignore[arg-type]
        assert (clipped > 0) == (clip < 10)
    free, none = value_loss(values, old, returns, mask, None)
    assert free.item() == pytest.approx((((values - returns) ** 2) * mask).sum().item() / 2)
    assert none == 0


# --- the update ---------------------------------------------------------------------------------------------


def token_table(policy: Policy, found: list[Sample]) -> Tensor:
    """Logprobs of the responses by plain passes, one for each: [B, T]."""
    rows = []
    for sample in found:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]])
        logits = policy.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float()
        chosen = ids[0, len(sample.prompt_ids) :].unsqueeze(1)
        rows.append(torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def value_table(model: torch.nn.Module, head: Tensor, found: list[Sample]) -> Tensor:
    """A critic's values: its head on the hidden states that predict each token (`_get_critic_model`)."""
    rows = []
    for sample in found:
        ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]])
        hidden = model.base_model(input_ids=ids).last_hidden_state[0]  # type: ignore[operator]
        rows.append((hidden @ head)[len(sample.prompt_ids) - 1 : -1])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def moved(model: torch.nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["all", "lora"])
@pytest.mark.parametrize("budget", [8192, 1], ids=["one-pass", "a-pass-each"])
def test_an_update_is_openrlhf_s(budget: int, lora: Lora | None) -> None:
    """The second mini-batch of a step, where ratios differ from 1 and values have moved."""
    algorithm, trainer = algorithm_of(lora=lora), Trainer(micro_batch_tokens=budget)
    policy, base, body = policy_of(), policy_of(), policy_of()
    policy.set_up(trainer, algorithm)
    critic = Critic(body, algorithm, trainer)
    moved(policy.model, 1)
    moved(body.model, 2)
    reference = Reference(policy, None if lora else base)
    learner = Learner(policy, algorithm, trainer, reference=reference, critic=critic)
    learner.begin_step(0)
    found = learner.recompute(critic.judge(learner.score_values(learner.score_reference(samples()))))
    used = [each for each in found if each.usable]
    length = torch.tensor([len(each.token_ids) for each in used])
    mask = (torch.arange(int(length.max())) < length[:, None]).float()
    with torch.no_grad():
        old = token_table(policy, used)
        old_values = value_table(body.model, getattr(body.model, VALUE_HEAD), used)
        engine = torch.nn.utils.rnn.pad_sequence([torch.tensor(x.logprobs) for x in used], batch_first=True)
        kl = engine - token_table(base, used)  # k1
        rewards = their_rewards(torch.tensor([x.reward for x in used]), KL.coef, kl * mask, mask)
        raw, returns = their_gae(old_values, rewards, mask, SETTINGS.gamma, SETTINGS.gae_lambda)
        advantages = their_whitening(raw, mask)
    for i, each in enumerate(used):
        n = len(each.token_ids)
        assert each.advantages == pytest.approx(advantages[i, :n].numpy(), abs=1e-5)
        assert each.returns == pytest.approx(returns[i, :n].numpy(), abs=1e-5)
    learner.accumulate(found[:4])
    learner.apply()
    learner.accumulate(found[4:])
    gradients = flat(policy.model) / learner.divisor, flat(body.model) / learner.divisor
    policy.model.zero_grad()
    body.model.zero_grad()
    later = [i for i, each in enumerate(used) if any(each is other for other in found[4:])]
    mask, taken = mask[later], [used[i] for i in later]

    def cut(table: Tensor) -> Tensor:
        return torch.nn.functional.pad(table, (0, mask.shape[1] - table.shape[1]))

    loss = their_policy_loss(cut(token_table(policy, taken)), old[later], advantages[later], mask)
    values = cut(value_table(body.model, getattr(body.model, VALUE_HEAD), taken))
    assert (values - old_values[later]).abs()[mask > 0].max() > SETTINGS.value_clip, "some are clipped"
    theirs = their_value_loss(values, old_values[later], returns[later], mask, SETTINGS.value_clip or 0)
    loss.backward()
    theirs.backward()
    for mine, model in zip(gradients, (policy.model, body.model), strict=True):
        assert flat(model).norm() > 1e-3
        assert (mine - flat(model)).norm() <= 1e-5 * flat(model).norm()


def test_metrics_say_how_well_values_predict() -> None:
    algorithm = algorithm_of(kl=None, ppo=Ppo())
    found = [
        replace(each, values=np.full(len(each.token_ids), each.reward, np.float32)) for each in samples()
    ]
    told = judged(found, algorithm)[1]
    assert told["explained_variance"] == pytest.approx(1.0)
    assert told["value_mean"] == pytest.approx(told["return_mean"])
    none = [replace(each, values=np.zeros(len(each.token_ids), np.float32)) for each in samples()]
    assert judged(none, algorithm)[1]["explained_variance"] == pytest.approx(0.0)
    unusable = [replace(each, usable=False) for each in none]
    assert judged(unusable, algorithm) == (unusable, {})


def step(learner: Learner, number: int) -> None:
    assert learner.critic is not None
    learner.begin_step(number)
    found = learner.critic.judge(learner.score_values(samples()))
    for part in (found[:4], found[4:]):
        learner.accumulate(part)
        learner.apply()


def learner_of(algorithm: Algorithm, policy: Policy, body: Policy) -> Learner:
    policy.set_up(Trainer(), algorithm)
    return Learner(policy, algorithm, critic=Critic(body, algorithm))


def test_a_warm_up_trains_the_critic_alone() -> None:
    algorithm = algorithm_of(kl=None, ppo=SETTINGS.model_copy(update={"warmup_steps": 1}))
    policy, body = policy_of(), policy_of()
    learner = learner_of(algorithm, policy, body)
    before = copy.deepcopy(policy.model.state_dict())
    step(learner, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    assert learner.metrics()["tokens_trained"] > 0
    assert learner.metrics()["entropy"] > 0
    assert learner.metrics()["critic_grad_norm"] > 0
    assert getattr(body.model, VALUE_HEAD).abs().max() > 0
    step(learner, 1)
    assert learner.metrics()["grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["all", "lora"])
def test_a_checkpoint_has_the_critic_and_goes_on_bit_for_bit(lora: Lora | None, tmp_path: Path) -> None:
    algorithm = algorithm_of(kl=None, lora=lora)
    straight = learner_of(algorithm, policy_of(), policy_of(1))
    step(straight, 0)
    at = TrainedState(0, 0, 0.0, 0.0, 0, 0.0, {})
    folder = checkpoint.write(tmp_path, TrainingState(straight).take(tmp_path), at, keep=1)
    assert checkpoint.newest_intact(tmp_path) == folder
    resumed = learner_of(algorithm, Policy.load(folder), Policy.load(folder / CRITIC))
    TrainingState(resumed).restore(folder)
    for learner in (straight, resumed):
        step(learner, 1)
    assert straight.critic is not None
    assert resumed.critic is not None
    pairs = [(straight.policy, resumed.policy), (straight.critic.body, resumed.critic.body)]
    for one, other in pairs:
        found = other.model.state_dict()
        for name, tensor in one.model.state_dict().items():
            assert torch.equal(tensor, found[name]), name
    shard = next((folder / CRITIC).glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(Exception, match=f"{CRITIC}.*is damaged"):
        checkpoint.newest_intact(tmp_path)


def test_only_ppo_may_have_groups_of_one() -> None:
    assert Algorithm(loss="ppo", group_size=1).critic == Ppo()
    with pytest.raises(ValidationError, match="group_size is 1, but grpo compares"):
        Algorithm(loss="grpo", group_size=1)
    with pytest.raises(ValidationError, match="a single response has no variance"):
        Algorithm(loss="ppo", group_size=1, zero_variance_groups="drop")
    assert Algorithm(loss="grpo").critic is None
