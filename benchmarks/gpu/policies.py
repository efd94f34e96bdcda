"""Policies of random weights in a given shape, with batches to train them on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from transformers.initialization import no_init_weights

from benchmarks.gpu.parts import HOST_GB
from benchmarks.gpu.shapes import SHAPES, FittedShape, ModelShape, fit
from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import END_ID, PAD_ID, make_tokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = 64
_LARGE, _TINY = ("0.6B", "1.7B", "8B", "30B-A3B"), ("tiny", "tiny-moe")
MICRO_BATCH_TOKENS = dict.fromkeys(_LARGE, 8192) | dict.fromkeys(_TINY, 256)
RESPONSE = dict.fromkeys(_LARGE, 1984) | dict.fromkeys(_TINY, 48)
POSITIONS = 4096
WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """What a trainer holds."""

    policy: Policy
    learner: Learner
    residency: Residency
    samples: list[Sample]
    """Of one step: two full micro-batches."""
    algorithm: Algorithm

    def step(self, number: int) -> None:
        """Train one step."""
        self.learner.begin_step(number)
        self.learner.accumulate(self.samples)
        self.learner.apply()

    @property
    def tokens(self) -> int:
        """Positions of a step."""
        return sum(len(sample.prompt_ids) + len(sample.token_ids) - 1 for sample in self.samples)


def use_all_cores(tiny: bool) -> int:
    """Let torch use the cores; one in a test. Return their number."""
    num = 1 if tiny else len(os.sched_getaffinity(0))
    torch.set_num_threads(num)
    return num


def host_bytes() -> int:
    """Return the main memory that is free for us, a container's limit included; or what `--host-gb` says."""
    if os.environ.get(HOST_GB):
        return int(float(os.environ[HOST_GB]) * 1e9)
    free = psutil.virtual_memory().available
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.exists() and (text := path.read_text().strip()).isdigit():
            free = min(free, int(text))
    return int(free)


def fitted(size: str) -> FittedShape:
    """Return the shape as it fits onto this machine."""
    shape = SHAPES[size]
    if DEVICE.type == "cpu":
        return FittedShape(shape, False, "on a CPU")
    free, _ = torch.cuda.mem_get_info()
    return fit(shape, MICRO_BATCH_TOKENS[size], free, host_bytes())


def make_model(shape: ModelShape) -> PreTrainedModel:
    """Return a model with random weights in main memory; the device draws them, which is faster."""
    config = (Qwen3MoeConfig if shape.experts else Qwen3Config)(**shape.config(POSITIONS))  # type: ignore[arg-type]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                drawn = torch.randn(parameter.shape, generator=generator, device=DEVICE)
                parameter.copy_(drawn.mul_(WEIGHT_SCALE))
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True
    )
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return model


def make_policy(size: str, shape: ModelShape, *, checkpointing: bool) -> TrainedPolicy:
    """Return a policy in main memory, as a trainer has it before its first lease, bfloat16 arithmetic."""
    algorithm = Algorithm(
        learning_rate=1e-5, learning_rate_warmup_steps=0, max_response_tokens=RESPONSE[size] + 1
    )
    trainer = Trainer(
        dtype="bfloat16", micro_batch_tokens=MICRO_BATCH_TOKENS[size], activation_checkpointing=checkpointing
    )
    policy = Policy(make_model(shape), make_tokenizer())
    policy.set_up(trainer, algorithm)
    learner = Learner(policy, algorithm, trainer)
    residency = Residency(policy, learner.optimizer)
    return TrainedPolicy(policy, learner, residency, make_samples(size, shape), algorithm)


def make_samples(size: str, shape: ModelShape) -> list[Sample]:
    """Return two micro-batches of sequences that fill them to the token, but for one per sequence."""
    draw = np.random.default_rng(0)
    num = 2 * MICRO_BATCH_TOKENS[size] // (PROMPT + RESPONSE[size])
    found = []
    for number in range(num):
        prompt = draw.integers(0, 256, PROMPT)
        tokens = draw.integers(0, shape.vocabulary, RESPONSE[size])
        logprobs = np.full(RESPONSE[size], -np.log(shape.vocabulary))
        found.append(Sample.of(prompt.tolist(), tokens.tolist(), logprobs.tolist(), 1.0 - 2.0 * (number % 2)))
    return found
