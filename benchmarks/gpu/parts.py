"""The parts of the check: what each measures, needs and may take. Without third-party imports."""

from __future__ import annotations

from dataclasses import dataclass

CORE = (
    "torch", "torch.distributed.fsdp:fully_shard", "torch.distributed.tensor:DTensor", "transformers",
    "transformers:Qwen3ForCausalLM", "transformers:Qwen3MoeForCausalLM",
    "transformers.core_model_loading:revert_weight_conversion",
    "transformers.integrations.moe:ExpertsInterface", "transformers.initialization:no_init_weights",
    "transformers.masking_utils:AttentionMaskInterface", "tokenizers", "safetensors", "numpy", "msgspec",
    "pydantic", "packaging", "psutil", "blake3",
)  # fmt: skip
"""Modules, and names in them that not every version has: fully_shard came with torch 2.6."""
ENGINE = "transformers:ContinuousBatchingConfig"
WEIGHTS = (*CORE, "zstandard")
HEAD = (
    *WEIGHTS, ENGINE, "numba", "aiohttp", "cryptography", "fastapi", "uvicorn", "uvloop", "websockets",
    "httpx2", "obstore", "rich", "ruamel.yaml", "typer", "reasoning_gym",
)  # fmt: skip
HOST_GB = "RLBOOST_GPU_CHECK_HOST_GB"
"""Environment variable: main memory to count on, in GB, instead of what is free now."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part, run in a process of its own: `module.run` with `size`. `loses`: without what it needs."""

    name: str
    module: str
    size: str
    limit_s: float
    needs: tuple[str, ...]
    loses: str


PARTS = (
    Part("training_0.6B", "training", "0.6B", 90, CORE, "tokens/s, MFU, peak memory and hand-over of 0.6B"),
    Part("deltas", "deltas", "0.6B", 75, (*WEIGHTS, "numba"), "deltas made on the device against the CPU's"),
    Part("cycle", "cycle", "0.6B", 120, (*WEIGHTS, ENGINE), "hand-overs with an engine, its tokens/s"),
    Part("training_8B", "training", "8B", 150, CORE, "tokens/s, MFU, peak memory and hand-over of 8B"),
    Part("training_moe", "training", "30B-A3B", 110, CORE, "the same of a mixture: layers of 30B-A3B"),
    Part("whole_run", "whole_run", "tiny", 240, HEAD, "a run through the lease and kills"),
    Part("training_1.7B", "training", "1.7B", 90, CORE, "tokens/s, MFU, peak memory and hand-over of 1.7B"),
    Part("vllm", "vllm", "0.6B", 180, (*WEIGHTS, "aiohttp"), "vLLM's tokens/s"),
)
"""By value: what comes last is skipped where time is over."""

_TINY_NAMES = {"training_0.6B": "training", "training_moe": "training_moe"}
TINY = tuple(
    Part(
        _TINY_NAMES.get(part.name, part.name),
        part.module,
        "tiny-moe" if "moe" in part.name else "tiny",
        240,
        part.needs,
        part.loses,
    )
    for part in PARTS
    if part.name in ("training_0.6B", "deltas", "cycle", "training_moe", "whole_run")
)


def every_import(parts: tuple[Part, ...]) -> list[str]:
    """Return what the parts import, each once."""
    return list(dict.fromkeys(name for part in parts for name in part.needs))


def losses(parts: tuple[Part, ...], missing: list[str]) -> dict[str, str]:
    """Return, by part that cannot run, what is missing and what is lost with it."""
    found = {}
    for part in parts:
        lacks = [name for name in part.needs if name in missing]
        if lacks:
            found[part.name] = f"not importable: {', '.join(lacks)}; lost: {part.loses}"
    return found
