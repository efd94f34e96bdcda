"""DPO's and SFT's loss against TRL 1.16.0's formulas, written out here on the model's own logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlboost_runtime.job import Algorithm, Dpo, Kl, Lora, Rejection, TinyModel, Trainer
from rlboost_runtime.trainer.learn.companions import Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.sample import Sample, chosen_responses
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TinyModel(init="tiny", hidden_size=32, num_layers=1)
BETA = 0.3


def policy_of(seed: int = 0) -> Policy:
    return Policy(make_model(TINY.model_copy(update={"seed": seed}), 64), make_tokenizer())


def pairs(num: int = 4) -> list[Sample]:
    """Groups of three responses each: one chosen, one rejected, one that is in no pair, in mixed order."""
    draw, found = np.random.default_rng(5), []
    for _ in range(num):
        prompt = draw.integers(0, 256, int(draw.integers(1, 6))).tolist()
        for sign in draw.permutation([1.0, -1.0, 0.0]).tolist():
            tokens = draw.integers(0, 256, int(draw.integers(1, 8))).tolist()
            found.append(Sample.of(prompt, tokens, [0.0] * len(tokens), sign, usable=sign != 0))
    return found


def token_logprobs(policy: Policy, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    rows = policy.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1].float()
    return torch.log_softmax(rows, -1).gather(1, ids[0, len(sample.prompt_ids) :].unsqueeze(1)).squeeze(1)


def trl_dpo(policy: Policy, reference: Policy, found: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """trl/trainer/dpo_trainer.py of 1.16.0, `_compute_loss`, loss_type sigmoid: the logratios are sums over
    the completion's tokens, `delta_score = chosen_logratios - rejected_logratios`, and
    `per_sequence_loss = -F.logsigmoid(self.beta * delta_score)`, whose mean is the loss.
    Also the margins, which its metrics call rewards."""
    margins = []
    for start in range(0, len(found), 3):
        ratio = {}
        for sample in found[start : start + 3]:
            with torch.no_grad():
                ref = token_logprobs(reference, sample).sum()
            ratio[sample.advantage] = token_logprobs(policy, sample).sum() - ref
        margins.append(BETA * (ratio[1.0] - ratio[-1.0]))
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).mean(), torch.stack(margins)


def trl_sft(policy: Policy, found: list[Sample]) -> torch.Tensor:
    """trl/trainer/sft_trainer.py of 1.16.0, `compute_loss` with loss_type nll: cross entropy of the
    completion's tokens, their sum divided by `num_items_in_batch`, the completion tokens of all micro-batches
    and ranks."""
    return -torch.cat([token_logprobs(policy, each) for each in found if each.usable]).mean()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def ours(
    policy: Policy, found: list[Sample], reference: Reference | None, algorithm: Algorithm, **trainer: Any
) -> tuple[float, torch.Tensor, dict[str, float]]:
    learner = Learner(policy, algorithm, Trainer(**trainer), reference=reference)
    learner.begin_step(0)
    for part in (found[:3], found[3:]):
        learner.accumulate(learner.score_reference(part) if reference else part)
    gradient = flat(policy.model) / learner.divisor
    learner.apply()
    return learner.metrics()["loss"], gradient, learner.metrics()


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["all", "lora"])
@pytest.mark.parametrize("budget", [8192, 1], ids=["one-pass", "a-pass-each"])
@pytest.mark.parametrize("loss", ["dpo", "sft", "rejection"])
def test_value_and_gradient_are_trl_s(loss: Any, budget: int, lora: Lora | None) -> None:
    algorithm = Algorithm(loss=loss, lora=lora, dpo=Dpo(beta=BETA), temperature=0.7 if loss != "dpo" else 1.0)
    policy, base, found = policy_of(), policy_of(), pairs()
    policy.set_up(Trainer(), algorithm)
    for parameter in policy.model.parameters():  # adapters begin at 0, where dpo's margin is 0
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    margins = torch.empty(0)
    if loss == "dpo":
        wanted, margins = trl_dpo(policy, base, found)
    else:
        wanted = trl_sft(policy, ones(found))
    wanted.backward()
    wanted_gradient = flat(policy.model)
    policy.model.zero_grad()
    reference = Reference(policy, None if lora else base) if loss == "dpo" else None
    if loss != "dpo":
        found = ones(found)
    value, gradient, metrics = ours(policy, found, reference, algorithm, micro_batch_tokens=budget)
    assert wanted_gradient.norm() > 1e-3
    assert value == pytest.approx(wanted.item(), rel=1e-5)
    assert (gradient - wanted_gradient).norm() <= 1e-5 * wanted_gradient.norm()
    assert (metrics["mismatch_tokens"] > 0) == (loss == "dpo")  # the others train at temperature 1
    if loss == "dpo":
        assert metrics["pairs"] == 4
        assert metrics["pair_margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
        assert metrics["pairs_ordered_share"] == (margins > 0).float().mean()


def ones(found: list[Sample]) -> list[Sample]:
    """The samples as imitation has them: 1 where they are trained."""
    return [replace(each, advantage=float(each.usable)) for each in found]


def test_a_choice_depends_on_rewards_and_numbers_only() -> None:
    dpo, rejection = Algorithm(loss="dpo"), Algorithm(loss="rejection", rejection=Rejection(keep=2))
    rewards = [0.0, 1.0, 0.0, 1.0, 0.5]
    assert chosen_responses(rewards, [True] * 5, dpo) == [-1, 1, 0, 0, 0]
    assert chosen_responses(rewards, [False, False, True, True, True], dpo) == [0, 0, -1, 1, 0]
    assert chosen_responses([1.0, 1.0 + 1e-12], [True] * 2, dpo) == [0, 0]  # a tie
    assert chosen_responses([1.0], [True], dpo) == [0]
    assert chosen_responses(rewards, [False] * 5, dpo) == [0] * 5
    assert chosen_responses(rewards, [True] * 5, rejection) == [0, 1, 0, 1, 0]
    assert chosen_responses([0.0, -1.0], [True] * 2, rejection) == [0, 0]  # nothing was rewarded
    any_best = Algorithm(loss="rejection", rejection=Rejection(above=None))
    assert chosen_responses([-2.0, -1.0], [True] * 2, any_best) == [0, 1]


def test_a_step_of_ties_moves_nothing() -> None:
    policy = policy_of()
    before = [parameter.clone() for parameter in policy.model.parameters()]
    none = [replace(each, usable=False) for each in pairs()]
    algorithm = Algorithm(loss="dpo")
    learner = Learner(policy, algorithm, reference=Reference(policy, policy_of(3)))
    learner.begin_step(0)
    learner.accumulate(learner.score_reference(none))
    learner.apply()
    metrics = learner.metrics()
    assert metrics["minibatches_empty"] == 1
    assert metrics["pairs"] == 0
    for old, new in zip(before, policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": "dpo", "kl": Kl()}, "dpo.beta"),
        ({"loss": "sft", "kl": Kl(**{"in": "reward"})}, "no rewards"),
        ({"loss": "sft", "max_staleness": 1}, "rolls nothing out"),
    ],
)
def test_what_does_not_go_together_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Algorithm(**settings)
