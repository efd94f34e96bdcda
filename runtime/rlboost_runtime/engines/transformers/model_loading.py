"""Weights of a version into a module, all or nothing.

Guarantees: a version is taken only if its file accounts for every tensor of the model, in its shape, and for
nothing else; tied tensors may appear under any one of their names; all of that is checked before anything is
changed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rlboost_runtime.engines.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlboost_runtime.engines.model_folder import WEIGHTS_FILE
from rlboost_runtime.file_tensors import FileLayout, FileTensor

_SAMPLE = 5  # names quoted in a problem
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"  # PEFT's names


class Unloadable(ValueError):
    """The folder does not hold weights for this model."""


def build_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a model of the folder's `config.json` with undefined weights. Raises `Unloadable`."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise Unloadable(f"layers of kind {sorted(kinds)}; this engine serves full attention only")
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # theirs
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.tie_weights()  # skipped along with the initialisation
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_weights(model: PreTrainedModel, folder: Path) -> int:
    """Copy the folder's weights into `model`; return how many. Raises `Unloadable` before any change."""
    layout = FileLayout.of(model)
    groups = [[layout.parts(name) for name in group] for group in _tied_groups(model)]
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
        plan = [part for group in groups for part in _pick(group, names)]
        _check(file, names, plan, {part.name for group in groups for parts in group for part in parts})
        state = model.state_dict()
        with torch.no_grad():
            for part in plan:
                part.within(state[part.of]).copy_(file.get_tensor(part.name))
    return len(plan)


def add_adapters(model: PreTrainedModel, folder: Path) -> int:
    """Add the folder's adapters, if it has any, to the weights of `model`; return how many. Raises
    `Unloadable` before any change."""
    path = folder / ADAPTER_WEIGHTS
    if not path.exists():
        return 0
    config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    scale = float(config["lora_alpha"]) / float(config["r"])
    state, plan = model.state_dict(), list[tuple[Tensor, Tensor, Tensor]]()
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name in sorted(name for name in names if name.endswith(_DOWN)):
            module = name.removeprefix(_PREFIX).removesuffix(_DOWN)
            up_name = f"{_PREFIX}{module}{_UP}"
            weight = state.get(f"{module}.weight")
            if up_name not in names or weight is None:
                raise Unloadable(f"{name} has no counterpart in the model or the adapters")
            down, up = file.get_tensor(name), file.get_tensor(up_name)
            if (up.shape[0], down.shape[1]) != tuple(weight.shape) or up.shape[1] != down.shape[0]:
                raise Unloadable(f"{name} and {up_name} do not fit a weight of shape {tuple(weight.shape)}")
            plan.append((weight, up, down))
    if 2 * len(plan) != len(names):
        raise Unloadable(f"{len(names) - 2 * len(plan)} tensors of the adapters are of no known kind")
    with torch.no_grad():
        for weight, up, down in plan:
            change = scale * (up.to(weight.device).float() @ down.to(weight.device).float())
            weight.copy_(weight.float() + change)
    return len(plan)


def _tied_groups(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of the model's tensors, those of one storage together."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict().items():
        groups[tensor.data_ptr()].append(name)
    return list(groups.values())


def _pick(group: list[list[FileTensor]], names: set[str]) -> list[FileTensor]:
    """Return the parts of that one of several tied tensors which the file has."""
    return next((parts for parts in group if all(part.name in names for part in parts)), group[0])


def _check(file: safe_open, names: set[str], plan: list[FileTensor], known: set[str]) -> None:
    missing = [part.name for part in plan if part.name not in names]
    if missing:
        raise Unloadable(f"{len(missing)} tensors are missing, such as {', '.join(missing[:_SAMPLE])}")
    extra = sorted(names - known)
    if extra:
        raise Unloadable(f"{len(extra)} tensors are not the model's, such as {', '.join(extra[:_SAMPLE])}")
    for part in plan:
        found = tuple(file.get_slice(part.name).get_shape())  # type: ignore[no-untyped-call] # theirs
        if found != part.shape:
            raise Unloadable(f"{part.name} has shape {found}, the model wants {part.shape}")
