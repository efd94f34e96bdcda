"""Weights of a version into a module, all or nothing.

Guarantees: a version is taken only if its file accounts for every tensor of the model, in its shape, and for
nothing else; tied tensors may appear under any one of their names; all of that is checked before anything is
changed.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rlboost_runtime.engines.model_folder import WEIGHTS_FILE

_SAMPLE = 5  # names quoted in a problem


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
    groups = _tied_groups(model)
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = set(file.keys())
        plan = [(_pick(group, names), group) for group in groups]
        _check(file, names, plan, model)
        state = model.state_dict()
        with torch.no_grad():
            for source, group in plan:
                state[group[0]].copy_(file.get_tensor(source))
    return len(plan)


def _tied_groups(model: PreTrainedModel) -> list[list[str]]:
    """Names of the model's tensors, those of one storage together."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict().items():
        groups[tensor.data_ptr()].append(name)
    return list(groups.values())


def _pick(group: list[str], names: set[str]) -> str:
    return next((name for name in group if name in names), group[0])


def _check(
    file: safe_open, names: set[str], plan: list[tuple[str, list[str]]], model: PreTrainedModel
) -> None:
    missing = [source for source, _ in plan if source not in names]
    if missing:
        raise Unloadable(f"{len(missing)} tensors are missing, such as {', '.join(missing[:_SAMPLE])}")
    extra = sorted(names - {name for _, group in plan for name in group})
    if extra:
        raise Unloadable(f"{len(extra)} tensors are not the model's, such as {', '.join(extra[:_SAMPLE])}")
    state = model.state_dict()
    for source, group in plan:
        found = tuple(file.get_slice(source).get_shape())  # type: ignore[no-untyped-call] # theirs
        wanted = tuple(state[group[0]].shape)
        if found != wanted:
            raise Unloadable(f"{source} has shape {found}, the model wants {wanted}")
