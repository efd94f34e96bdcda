"""Generation: the engines and the machines that they run on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlboost_runtime.job.base import Model
from rlboost_runtime.job.fleet import CloudOffer, Spot, num_devices


class EngineArgs(Model):
    """Options of the engine."""

    max_running: int = Field(default=16, ge=1)
    """Responses that one engine decodes at once."""
    tokens_per_s_per_response: float | None = Field(default=None, gt=0)
    """Paces generation so that a tiny model takes as long as a large one; null: as fast as it goes."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of one engine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engine's weights."""
    python: str | None = None
    """vllm: the Python that has it installed; null: RLBOOST_VLLM_PYTHON, else the venv beside the agent's."""
    enforce_eager: bool = False
    """vllm: compile nothing; starts minutes sooner, decodes slower. Builds for CPUs always do so."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """vllm: share of the GPU's memory for weights and cache; null: vLLM's own default."""
    kv_cache_mib: int | None = Field(default=None, ge=1)
    """vllm: MiB of KV cache; null: the rest of the GPU's share, or on CPUs what max_running contexts need."""
    fp8: bool = False
    """vllm: weights in fp8; needs a GPU of compute capability 8.9. Watch the mismatch with the trainer."""
    speculative: Literal["ngram", "suffix"] | None = None
    """vllm: let earlier text propose tokens; turned off by itself while that measures slower."""


VLLM_OPTIONS = ("python", "enforce_eager", "gpu_memory_utilization", "kv_cache_mib", "fp8", "speculative")
"""Fields of `EngineArgs` that no other engine understands."""


class Rollout(Model):
    """Generation."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Inference engine on every instance; vllm: has a Python of its own (docs/engines.md)."""
    tensor_parallel: int = Field(default=1, ge=1)
    """vllm: GPUs of one engine. A machine runs one engine per so many of its GPUs, each with an agent of its
    own; the reserved node runs trainer.local_engines of them."""
    engine_args: EngineArgs = EngineArgs()
    """Options of the engine."""
    spot: Spot = Spot()
    """The preemptible pool."""
    seeding_initial_s: float = Field(default=10.0, ge=0)
    """First seeding window (T_init); adapted from then on."""

    def engines_on(self, accelerators: str | None) -> int:
        """Return how many engines a spot machine with `accelerators` runs: at least one."""
        return max(1, num_devices(accelerators or "") // self.tensor_parallel)

    def most_spot_engines(self, *, here: bool = False) -> int:
        """Return the most engines that spot machines run: all of them, or those on this very machine."""
        offers = self.spot.local_offers if here else self.spot.any_of
        per_machine = (self.engines_on(offer.accelerators) for offer in offers)
        return self.spot.max_instances * max(per_machine, default=0)

    @model_validator(mode="after")
    def _engines_fill_machines(self) -> Self:
        for offer in self.spot.any_of:
            is_counted = isinstance(offer, CloudOffer) or ":" in (offer.accelerators or "")
            if is_counted and num_devices(offer.accelerators or "") % self.tensor_parallel:
                raise ValueError(
                    f"tensor_parallel is {self.tensor_parallel}, which does not divide the devices of"
                    f" {offer.accelerators} in spot.any_of; write a number that does"
                )
        return self

    @model_validator(mode="after")
    def _options_are_the_engines(self) -> Self:
        if self.engine == "vllm":
            return self
        if self.tensor_parallel > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, but the engine {self.engine} uses one device;"
                " write engine: vllm, or remove it"
            )
        defaults = EngineArgs()
        for name in VLLM_OPTIONS:
            if getattr(self.engine_args, name) != getattr(defaults, name):
                raise ValueError(
                    f"engine_args has {name}, an option of vllm, but the engine is {self.engine};"
                    " write engine: vllm, or remove it"
                )
        return self
