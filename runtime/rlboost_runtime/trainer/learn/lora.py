"""Low-rank adapters (LoRA, arXiv 2106.09685) by way of peft: put into a model, taken out, merged, or made
files that engines add by themselves.

The model's own weights are frozen and every linear layer but the head gets an adapter: W + alpha / rank x B
A. All functions below work on plain tensors by name, so that they serve a sharded model's gathered state too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from rlboost_runtime.engines.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Lora
from rlboost_runtime.trainer.learn.logprobs import VALUE_HEAD

_NAME = "default"
_A = re.compile(rf"(.*)\.lora_A\.{_NAME}\.weight")


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze the model, but not a critic's head, and give it adapters; a fresh adapter changes nothing, since
    B is 0."""
    from peft import LoraConfig, inject_adapter_in_model  # seconds to import

    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.scaled_by, target_modules="all-linear", lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name == VALUE_HEAD)


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model computes with its own weights alone."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    assert layers, "there are no adapters"
    for layer in layers:  # peft's enable_adapters() would also change which weights are trained
        setattr(layer, "_disable_adapters", True)  # noqa: B010 - nn.Module declares no such attribute
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, "_disable_adapters", False)  # noqa: B010


def adapters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters' tensors of `state`."""
    return {name: tensor for name, tensor in state.items() if ".lora_" in name}


def frozen(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's own tensors of `state`, under the names that they have without adapters."""
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name
    }


def merged(state: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Return the model's tensors with the adapters added in, in the tensors' dtype."""
    found = frozen(state)
    for name, down in state.items():
        if match := _A.fullmatch(name):
            up = state[name.replace(".lora_A.", ".lora_B.")]
            weight = found[f"{match[1]}.weight"]
            change = (up.float() @ down.float()) * (lora.scaled_by / lora.rank)
            found[f"{match[1]}.weight"] = (weight.float() + change).to(weight.dtype)
    return found


def version_files(state: Mapping[str, Tensor], lora: Lora, dtype: str) -> dict[str, bytes]:
    """Return the adapters of `state` as files of a weight version, in PEFT's layout and in `dtype`."""
    kind = getattr(torch, dtype)
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    for name, tensor in adapters(state).items():
        module, _, side = name.replace(f".{_NAME}.weight", "").rpartition(".")
        targets.add(module.rpartition(".")[2])
        tensors[f"base_model.model.{module}.{side}.weight"] = tensor.to("cpu", kind).contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.scaled_by,
        "target_modules": sorted(targets), "bias": "none", "base_model_name_or_path": "..",
    }  # fmt: skip
    return {ADAPTER_WEIGHTS: to_bytes(tensors), ADAPTER_CONFIG: json.dumps(config, indent=1).encode()}


def check_shapes(model: PreTrainedModel, stored: Mapping[str, torch.Size], source: object) -> None:
    """Raise `ConfigError` unless the adapters of `source`, by name, fit those of `model`."""
    wanted = {name: tensor.shape for name, tensor in adapters(model.state_dict()).items()}
    if dict(stored) != wanted:
        raise ConfigError(
            f"algorithm.lora: the adapters in {source} have other shapes than the job's",
            "use the rank that the run began with",
        )
