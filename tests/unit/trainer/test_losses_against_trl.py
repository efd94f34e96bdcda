"""The same batch through TRL's own `GRPOTrainer._compute_loss` and through our learner."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlboost_runtime.job import Algorithm, Kl, TinyModel
from rlboost_runtime.trainer.learn.companions import Reference
from rlboost_runtime.trainer.learn.learner import Learner, Sample
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import PAD_ID, make_model, make_tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]  # TRL's import takes its time

TINY = TinyModel(init="tiny", hidden_size=64, num_layers=2)
MAX_TOKENS = 9
TEMPERATURE = 0.8

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.2},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # TRL bounds the ratio itself
}
"""Our defaults of each loss, in TRL's words."""

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {"importance_sampling": "none"},
    "token": {"importance_sampling": "token", "importance_cap": 1.2},
    "icepop": {"importance_sampling": "icepop", "importance_cap": 1.3, "importance_floor": 0.8},
    "sequence_mask": {"importance_sampling": "sequence_mask", "importance_cap": 1.4},
}


def samples(policy: Policy) -> list[Sample]:
    """Eight responses of different lengths, old and engine some way from the policy: ratios are clipped."""
    draw = np.random.default_rng(3)
    found = []
    for _ in range(8):
        prompt = draw.integers(0, 256, int(draw.integers(1, 6))).tolist()
        tokens = draw.integers(0, 256, int(draw.integers(1, MAX_TOKENS + 1))).tolist()
        found.append(Sample.of(prompt, tokens, [0.0] * len(tokens), float(draw.normal())))
    learner = Learner(policy, Algorithm(temperature=TEMPERATURE))
    exact = learner.recompute(found)
    noisy = []
    for sample in exact:
        assert sample.old_logprobs is not None
        old = sample.old_logprobs + draw.normal(0, 0.25, len(sample.old_logprobs))
        engine = old + draw.normal(0, 0.15, len(old))
        noisy.append(replace(sample, old_logprobs=old.astype("f4"), logprobs=engine.astype("f4")))
    return noisy


BETA = 0.3


def with_reference(found: list[Sample]) -> list[Sample]:
    """The samples with logprobs of another model."""
    policy = Policy(make_model(TINY, 64), make_tokenizer())
    other = Policy(make_model(TINY.model_copy(update={"seed": 9}), 64), make_tokenizer())
    algorithm = Algorithm(temperature=TEMPERATURE, kl=Kl())
    return Learner(policy, algorithm, reference=Reference(policy, other)).score_reference(found)


def ours(policy: Policy, found: list[Sample], **changes: Any) -> tuple[float, torch.Tensor]:
    algorithm = Algorithm(
        temperature=TEMPERATURE, max_response_tokens=MAX_TOKENS, dual_clip=None, micro_batch_responses=3,
        **changes,
    )  # fmt: skip
    learner = Learner(policy, algorithm)
    learner.begin_step(0)
    learner.accumulate(found)
    gradient = flat(policy.model) / learner.divisor
    learner.apply()
    return learner.sums.metrics()["loss"], gradient


def flat(model: torch.nn.Module) -> torch.Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def padded(rows: list[np.ndarray], fill: float, *, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    gaps = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
    return torch.tensor(
        np.stack([np.pad(row, gap, constant_values=fill) for row, gap in zip(rows, gaps, strict=True)])
    )


def trl_inputs(found: list[Sample], correction: str) -> dict[str, torch.Tensor]:
    prompts, tokens = [s.prompt_ids for s in found], [s.token_ids for s in found]
    mask = padded([np.ones_like(row) for row in tokens], 0)
    old = padded([s.old_logprobs for s in found], 0.0)
    inputs = {
        "prompt_ids": padded(prompts, PAD_ID, left=True),
        "prompt_mask": padded([np.ones_like(row) for row in prompts], 0, left=True),
        "completion_ids": padded(tokens, PAD_ID),
        "completion_mask": mask,
        "advantages": torch.tensor([s.advantage for s in found]),
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    if correction != "none":
        inputs["importance_sampling_ratio"] = trl_ratio(
            old - padded([s.logprobs for s in found], 0.0), correction
        )
    return inputs


def trl_ratio(difference: torch.Tensor, correction: str) -> torch.Tensor:
    """What TRL computes while it scores completions: token_truncate, token_mask and sequence_mask."""
    settings = CORRECTIONS[correction]
    if correction == "sequence_mask":
        difference = difference.sum(dim=-1, keepdim=True)
    ratio, low, high = difference.exp(), settings.get("importance_floor", 0.0), settings["importance_cap"]
    return (
        ratio.clamp(max=high)
        if correction == "token"
        else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    )


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL's module, imported without its network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import trl

    return trl


def theirs(
    trl: Any, model: Any, found: list[Sample], loss: str, correction: str, folder: Path, beta: float = 0.0
) -> tuple[float, torch.Tensor]:
    from datasets import Dataset

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=len(found), num_generations=len(found),
            gradient_accumulation_steps=1, max_completion_length=MAX_TOKENS, temperature=TEMPERATURE,
            beta=0.0, use_bias_correction_kl=False, report_to=[], use_cpu=True,
            bf16=False, gradient_checkpointing=False, **LOSSES[loss],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * len(found)}),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    inputs = trl_inputs(found, correction)
    if beta:  # set here, as the constructor would fetch a reference by the model's name
        trainer.beta = beta
        inputs["ref_per_token_logps"] = padded([s.reference_logprobs for s in found], 0.0)
    if correction != "none":  # what a TRL run with vLLM multiplies with
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    value = trainer._compute_loss(trainer.model, inputs)
    value.backward()
    return value.item(), flat(trainer.model)


CASES = [(loss, "none") for loss in LOSSES] + [("dapo", c) for c in CORRECTIONS if c != "none"] + [
    ("cispo", "token"), ("gspo", "sequence_mask"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "correction"), CASES)
def test_value_and_gradient_agree_with_trl(trl, tmp_path, loss, correction):
    policy = Policy(make_model(TINY, 64), make_tokenizer())
    found = samples(policy)
    value, gradient = ours(policy, found, loss=loss, **CORRECTIONS[correction])
    wanted, wanted_gradient = theirs(trl, make_model(TINY, 64), found, loss, correction, tmp_path)
    assert wanted_gradient.norm() > 1e-4
    assert value == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert (gradient - wanted_gradient).norm() <= 1e-5 * wanted_gradient.norm()


@pytest.mark.parametrize(
    ("loss", "correction"), [("dapo", "token"), ("grpo", "none"), ("dr_grpo", "none"), ("gspo", "none")]
)
def test_the_kl_term_agrees_with_trl(trl, tmp_path, loss, correction):
    policy = Policy(make_model(TINY, 64), make_tokenizer())
    found = with_reference(samples(policy))
    settings = CORRECTIONS[correction]
    value, gradient = ours(policy, found, loss=loss, kl=Kl(coef=BETA), **settings)
    wanted, wanted_gradient = theirs(trl, make_model(TINY, 64), found, loss, correction, tmp_path, BETA)
    assert value == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    assert (gradient - wanted_gradient).norm() <= 1e-5 * wanted_gradient.norm()
    _, without = ours(Policy(make_model(TINY, 64), make_tokenizer()), found, loss=loss, **settings)
    assert (without - gradient).norm() > 1e-3 * gradient.norm()


def test_the_comparison_would_notice_another_loss(trl, tmp_path):
    policy = Policy(make_model(TINY, 64), make_tokenizer())
    found = samples(policy)
    _, gradient = ours(policy, found, loss="grpo", importance_sampling="none")
    _, other = theirs(trl, make_model(TINY, 64), found, "dapo", "none", tmp_path)
    assert (gradient - other).norm() > 1e-2 * other.norm()
