"""KL, entropy, weight decay and schedules against what is written out here, and through a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from rlboost_runtime.job import Algorithm, EntropyBonus, Kl, Lora, TinyModel, Trainer
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.learn.companions import Reference
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.ranks import Adam
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TinyModel(init="tiny", hidden_size=32, num_layers=1)
TEMPERATURE = 0.7


def policy_of(seed: int = 0) -> Policy:
    return Policy(make_model(TINY.model_copy(update={"seed": seed}), 64), make_tokenizer())


def samples(seed: int = 0) -> list[Sample]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(5):
        tokens = draw.integers(0, 256, int(draw.integers(1, 6))).tolist()
        prompt = draw.integers(0, 256, 3).tolist()
        found.append(Sample.of(prompt, tokens, [-5.0] * len(tokens), float(draw.normal())))
    return found


def logits(policy: Policy, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    found = policy.model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
    return torch.log_softmax(found.float() / TEMPERATURE, dim=-1)


def written_out(
    policy: Policy, reference: Policy, found: list[Sample], estimator: str, kl: float, entropy: float
) -> torch.Tensor:
    """DAPO's loss on policy, token by token, as its papers and TRL write it."""
    terms = []
    for sample in found:
        log_TV = logits(policy, sample)
        tokens = torch.from_numpy(sample.token_ids).long().unsqueeze(1)
        now = log_TV.gather(1, tokens).squeeze(1)
        with torch.no_grad():
            ref = logits(reference, sample).gather(1, tokens).squeeze(1)
        distance = {
            "k1": now - ref,
            "k2": (now - ref) ** 2 / 2,
            "k3": torch.exp(ref - now) - (ref - now) - 1,
        }[estimator]
        undecided = -(log_TV.exp() * log_TV).sum(-1)
        ratio = torch.exp(now - now.detach())
        terms.append(-ratio * sample.advantage + kl * distance - entropy * undecided)
    return torch.cat(terms).mean()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def loss_and_gradient(learner: Learner, found: list[Sample], step: int = 0) -> tuple[float, torch.Tensor]:
    learner.begin_step(step)
    if learner._reference is not None:
        found = learner.score_reference(found)
    for part in (found[:2], found[2:]):
        learner.accumulate(part)
    gradient = flat(learner.policy.model) / learner.divisor
    learner.apply()
    return learner.sums.metrics()["loss"], gradient


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_entropy_are_those_written_out(estimator: Any) -> None:
    algorithm = Algorithm(
        temperature=TEMPERATURE, importance_sampling="none", dual_clip=None,
        kl=Kl(coef=0.2, estimator=estimator), entropy_bonus=EntropyBonus(coef=0.05, final_coef=0.0),
    )  # fmt: skip
    policy, reference, found = policy_of(), policy_of(3), samples()
    wanted = written_out(policy, reference, found, estimator, 0.2, 0.05)
    wanted.backward()
    wanted_gradient = flat(policy.model)
    policy.model.zero_grad()
    policy.set_up(Trainer(), algorithm)
    learner = Learner(policy, algorithm, reference=Reference(policy, reference))
    value, gradient = loss_and_gradient(learner, found)
    assert value == pytest.approx(wanted.item(), rel=1e-5)
    assert (gradient - wanted_gradient).norm() <= 1e-5 * wanted_gradient.norm()
    assert learner.sums.metrics()["reference_kl"] != 0


def test_padded_models_have_the_entropy_s_gradient_too() -> None:
    algorithm = Algorithm(importance_sampling="none", entropy_bonus=EntropyBonus(coef=0.5))
    found = []
    for padded in (False, True):
        policy = policy_of()
        policy.scorer.why_not_packed = "asked for" if padded else None
        policy.set_up(Trainer(), algorithm)
        found.append(loss_and_gradient(Learner(policy, algorithm), samples())[1])
    assert (found[0] - found[1]).norm() <= 1e-5 * found[0].norm()


def test_the_base_under_adapters_is_the_reference_without_a_copy() -> None:
    algorithm = Algorithm(
        importance_sampling="none", learning_rate=1e-2, learning_rate_warmup_steps=0, lora=Lora(rank=4),
        kl=Kl(coef=0.5),
    )  # fmt: skip
    found = []
    for other in (None, policy_of()):
        policy = policy_of()
        policy.set_up(Trainer(), algorithm)
        learner = Learner(policy, algorithm, reference=Reference(policy, other))
        results = [loss_and_gradient(learner, samples(seed)) for seed in range(3)]
        assert learner.sums.metrics()["reference_kl"] > 1e-6  # the adapters have moved
        found.append(results)
    for (value, gradient), (other_value, other_gradient) in zip(*found, strict=True):
        assert value == pytest.approx(other_value, rel=1e-5, abs=1e-7)
        assert (gradient - other_gradient).norm() <= 1e-5 * other_gradient.norm()


def test_a_step_without_the_reference_s_logprobs_is_no_step() -> None:
    policy = policy_of()
    learner = Learner(policy, Algorithm(kl=Kl()), reference=Reference(policy, policy_of(3)))
    with pytest.raises(AssertionError, match="score_reference"):
        learner.accumulate(samples())


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("linear", "linear", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", "warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear"}),
        ("constant", "constant_with_warmup", {}),
    ],
)
def test_schedules_are_those_of_transformers(name: Any, theirs: str, options: dict[str, Any]) -> None:
    decays = {"learning_rate_decay_steps": 5} if name == "warmup_stable_decay" else {}
    algorithm = Algorithm(
        steps=20, learning_rate=2.0, learning_rate_warmup_steps=4, learning_rate_schedule=name,
        learning_rate_floor=options.get("min_lr_rate", 0.0), **decays,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = get_scheduler(
        theirs,
        optimizer,
        num_warmup_steps=4,
        num_training_steps=20,
        scheduler_specific_kwargs=options or None,
    )
    wanted = []
    for _ in range(20):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert [algorithm.learning_rate_at(step) for step in range(4, 20)] == pytest.approx(wanted[4:])
    assert [algorithm.learning_rate_at(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]


def test_entropy_s_coefficient_falls_linearly_to_the_last_step() -> None:
    algorithm = Algorithm(steps=5, entropy_bonus=EntropyBonus(coef=0.4, final_coef=0.0))
    assert [algorithm.entropy_coef_at(step) for step in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((2, 2), (2,)))
    optimizer = Adam([matrix, vector], lr=0.1, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.5)
    for parameter in (matrix, vector):
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.update()
    moved = 0.1 * 0.01 / (0.01 + 1e-3)  # the moments are the gradient and its square after one step
    assert vector.tolist() == pytest.approx([1 - moved] * 2)
    assert matrix.flatten().tolist() == pytest.approx([1 - 0.1 * 0.5 - moved] * 4)


def test_all_of_it_goes_on_bit_for_bit_after_a_kill(tmp_path: Path) -> None:
    algorithm = Algorithm(
        steps=6, learning_rate=1e-2, learning_rate_warmup_steps=1, learning_rate_schedule="cosine",
        weight_decay=0.1, adam_betas=[0.8, 0.9], kl=Kl(coef=0.1), importance_sampling="none",
        entropy_bonus=EntropyBonus(coef=0.1, final_coef=0.0),
    )  # fmt: skip

    def learner_of(policy: Policy) -> Learner:
        policy.set_up(Trainer(), algorithm)
        return Learner(policy, algorithm, reference=Reference(policy, policy_of(3)))

    whole = learner_of(policy_of())
    for step in range(6):
        loss_and_gradient(whole, samples(step), step)
        if step == 2:
            state = checkpoint.TrainedState(2, 0, 0.0, 0.0, 0, 0.0, {})
            folder = checkpoint.write(tmp_path, checkpoint.TrainingState(whole).take(tmp_path), state, keep=1)
    resumed = learner_of(Policy.load(folder))
    checkpoint.TrainingState(resumed).restore(folder)
    for step in range(3, 6):
        loss_and_gradient(resumed, samples(step), step)
    for mine, theirs in zip(resumed.policy.model.parameters(), whole.policy.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("changes", [{"kl": Kl()}, {"entropy_bonus": EntropyBonus()}])
def test_reinforce_pp_has_no_further_terms_in_its_loss(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="reinforce_pp"):
        Algorithm(loss="reinforce_pp", **changes)
    Algorithm(loss="reinforce_pp", kl=Kl(**{"in": "reward"}))


def test_what_is_not_trained_needs_no_reference() -> None:
    policy = policy_of()
    learner = Learner(policy, Algorithm(kl=Kl()), reference=Reference(policy, policy_of(3)))
    found = [replace(samples()[0], usable=False), samples()[1]]
    scored = learner.score_reference(found)
    assert scored[0].reference_logprobs is None
    assert scored[1].reference_logprobs is not None
