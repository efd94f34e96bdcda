"""One GRPO step (forward, backward, clip, AdamW) on a given batch: ours and TRL's, each in a process of its
own.

`python -m benchmarks.trainer.sides SIDE` reads a line per wanted step from stdin and answers each with a JSON
line: CPU seconds of this process, the loss, the gradient's norm, and the peak memory in bytes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import END_ID, PAD_ID, make_tokenizer

GROUPS, GROUP_SIZE = 4, 8
VOCABULARY = 8192
LONGEST = 320
LEARNING_RATE = 1e-6


@dataclass(frozen=True, slots=True)
class Step:
    """What a step found."""

    loss: float
    grad_norm: float


def make_model() -> Qwen3ForCausalLM:
    """A small Qwen3 with the proportions of a large one, the vocabulary included."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
        tie_word_embeddings=True, pad_token_id=PAD_ID, eos_token_id=END_ID, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=END_ID, pad_token_id=PAD_ID
    )
    return model


def make_batch() -> list[Sample]:
    """32 responses to 4 prompts; lengths are synthetic: log-normal with a long tail, as in RL with
    reasoning."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(GROUPS):
        prompt = draw.integers(0, 256, int(draw.integers(24, 96))).tolist()
        advantages = draw.normal(size=GROUP_SIZE)
        for advantage in advantages - advantages.mean():
            length = int(np.clip(draw.lognormal(4.4, 0.7), 8, LONGEST))
            tokens = draw.integers(0, VOCABULARY, length).tolist()
            found.append(
                Sample.of(prompt, tokens, [float(np.log(1 / VOCABULARY))] * length, float(advantage))
            )
    return found


def ours(batch: list[Sample], tokens: int) -> Callable[[], Step]:
    """Our learner, at most `tokens` tokens per pass; without correction, because TRL has none here."""
    policy = Policy(make_model(), make_tokenizer())
    algorithm = Algorithm(
        loss="dapo", learning_rate=LEARNING_RATE, learning_rate_warmup_steps=0, max_response_tokens=LONGEST,
        clip_high=0.2, importance_sampling="none",
    )  # fmt: skip
    trainer = Trainer(micro_batch_tokens=tokens)
    policy.set_up(trainer, algorithm)
    learner = Learner(policy, algorithm, trainer)

    def step() -> Step:
        learner.begin_step(0)
        learner.accumulate(batch)
        learner.apply()
        metrics = learner.sums.metrics()
        return Step(metrics["loss"], metrics["grad_norm"])

    return step


def trl(batch: list[Sample], rows: int, folder: str) -> Callable[[], Step]:
    """TRL's `GRPOTrainer`, given the batch where it would generate one; `rows` responses per forward pass."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    class Given(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return padded(batch)

    def no_reward(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    passes = len(batch) // rows
    trainer: Any = Given(  # its attributes are set up late and typed as optional
        model=make_model(),
        reward_funcs=no_reward,  # type: ignore[arg-type]
        args=GRPOConfig(
            output_dir=folder, per_device_train_batch_size=rows,
            gradient_accumulation_steps=passes, num_generations=GROUP_SIZE, max_completion_length=LONGEST,
            loss_type="dapo", beta=0.0, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            adam_beta2=0.95, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * GROUPS}),
        processing_class=_plain(make_tokenizer()),
    )  # fmt: skip
    trainer.create_optimizer()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = passes
    parameters = list(trainer.model.parameters())

    def step() -> Step:
        loss = sum(float(trainer.training_step(trainer.model, [{}], None)) for _ in range(passes))
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return Step(loss, float(norm))

    return step


def _plain(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.padding_side = "left"
    return tokenizer


def padded(batch: list[Sample]) -> dict[str, torch.Tensor]:
    """The batch as TRL makes it from completions: prompts padded on the left, responses on the right."""
    wide_prompt = max(len(sample.prompt_ids) for sample in batch)
    wide = max(len(sample.token_ids) for sample in batch)
    prompts = torch.full((len(batch), wide_prompt), PAD_ID)
    tokens = torch.full((len(batch), wide), PAD_ID)
    prompt_mask, mask = torch.zeros_like(prompts), torch.zeros_like(tokens)
    for i, sample in enumerate(batch):
        prompts[i, wide_prompt - len(sample.prompt_ids) :] = torch.tensor(sample.prompt_ids)
        prompt_mask[i, wide_prompt - len(sample.prompt_ids) :] = 1
        tokens[i, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        mask[i, : len(sample.token_ids)] = 1
    return {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": tokens, "completion_mask": mask,
        "advantages": torch.tensor([sample.advantage for sample in batch]), "num_items_in_batch": mask.sum(),
    }  # fmt: skip


def main(side: str, size: int) -> None:
    """Answer each line of stdin with a step."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    batch = make_batch()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        step = ours(batch, size) if side == "ours" else trl(batch, size, folder)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for _ in sys.stdin:
            print(json.dumps(measured(step)), file=answers, flush=True)


def measured(step: Callable[[], Step]) -> dict[str, float]:
    """Do a step; return what it found and took."""
    started = time.process_time()
    found = step()
    return {
        "cpu_s": time.process_time() - started,
        "loss": found.loss,
        "grad_norm": found.grad_norm,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
