"""How much disk and memory a job's model takes: arithmetic, without torch.

Sizes are estimates and lean upwards; what they are made of stands beside each figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlboost_runtime.job import Job

if TYPE_CHECKING:
    from rlboost_runtime.trainer.data.reading import Example

WEIGHT_BYTES, GRADIENT_BYTES, ADAM_BYTES = 4, 4, 8
"""Per parameter, in float32: itself, its gradient, AdamW's two moments. Adapters (`lora`) are too small to
count; ranks share all three."""
LOGITS_COPIES = 3
"""The logits of a micro-batch, their log-softmax and the gradient."""
PROCESS_BYTES = 400 * 1024 * 1024
"""A process that has imported torch and transformers: 350 MB resident on Linux, CPU build of torch 2.13."""
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its configuration describes it."""

    num_parameters: int
    """Tied ones once."""
    vocabulary: int
    kv_elements_per_token: int
    """Keys and values of all layers."""
    encode: Callable[[Example], tuple[str, Sequence[int]]]
    """What the model reads of a prompt, and its token ids."""
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a run needs."""

    checkpoint: int
    version: int
    """One weight version, as engines get it."""
    trainer: int
    engine: int


def footprint(job: Job, facts: ModelFacts) -> Footprint:
    """Return the bytes that trainer, an engine and their files take."""
    algorithm, engine = job.algorithm, job.rollout.engine_args
    context = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    logits = max(context, job.trainer.micro_batch_tokens) * facts.vocabulary * 4
    trained = 0 if algorithm.lora is not None else facts.num_parameters
    element = BYTES_PER_ELEMENT[engine.dtype]
    version = facts.num_parameters * element
    return Footprint(
        checkpoint=facts.num_parameters * WEIGHT_BYTES + trained * ADAM_BYTES,
        version=version,
        trainer=_reference(job, facts)
        + job.trainer.ranks * (PROCESS_BYTES + LOGITS_COPIES * logits)
        + facts.num_parameters * WEIGHT_BYTES
        + trained * (GRADIENT_BYTES + ADAM_BYTES),
        engine=PROCESS_BYTES + version + engine.max_running * context * facts.kv_elements_per_token * element,
    )


def _reference(job: Job, facts: ModelFacts) -> int:
    """Return the bytes of a KL's reference in main memory, taken to be as large as the policy."""
    kl = job.algorithm.kl
    if kl is None or (kl.reference == "start" and job.algorithm.lora is not None):
        return 0
    return facts.num_parameters * (2 if job.trainer.dtype == "bfloat16" else 4)
