"""A model's weights, read from its files by the rank that keeps them: no rank holds a whole model meanwhile.

A hollow model has every parameter with shape and dtype but without memory; buffers are real. Sharding fills
in each rank's rows (`ranks.shard`), which `StoredWeights` reads straight from the files.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rlboost_runtime.file_tensors import FileLayout


class StoredWeights:
    """The weights in a model's safetensors files, by the model's own names."""

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        """Raises `OSError` and `ValueError` where the files cannot be read."""
        self._files = ExitStack()
        self._layout = layout
        self._of: dict[str, Any] = {}  # safetensors has no types
        index = folder / "model.safetensors.index.json"
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        for name in sorted(names):
            try:
                file = self._files.enter_context(safe_open(folder / name, framework="pt"))
            except SafetensorError as exc:
                raise ValueError(f"{folder / name}: {exc}") from exc
            self._of |= dict.fromkeys(file.keys(), file)

    def fits(self, model: nn.Module) -> bool:
        """Return True if every parameter of `model` is stored as the layout has it, and can be read by
        rows."""
        return all(name in self and self._layout.can_read_rows(name) for name, _ in model.named_parameters())

    def __contains__(self, name: str) -> bool:
        parts = self._layout.parts(name)
        return bool(parts) and all(
            part.name in self._of and self._shape(part.name) == part.shape for part in parts
        )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows of a weight; only these are read."""
        return self._layout.read_rows(name, start, stop, self._read)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _read(self, name: str, start: int | None, stop: int | None) -> Tensor:
        file = self._of[name]
        found: Tensor = file.get_tensor(name) if start is None else file.get_slice(name)[start:stop]
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())


def hollow_model(folder: str | Path) -> PreTrainedModel:
    """Return the model that `folder` (or a hub name, as cached) describes, in float32 without its weights.

    Raises `OSError` and `ValueError` as `transformers` does.
    """
    from accelerate import init_empty_weights  # type: ignore[import-untyped] # ships no types

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()
    with suppress(OSError):  # it has none: what its config says
        model.generation_config = GenerationConfig.from_pretrained(folder)
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in empty:  # in main memory, one element for all: adapters go where they are
                one = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
                empty[parameter] = nn.Parameter(one, requires_grad=True)
            setattr(module, name, empty[parameter])
    return model


def find_stored(folder: str | Path, model: PreTrainedModel) -> StoredWeights | None:
    """Return the weights in `folder` (or of a hub name, as cached).

    None where they are not what `FileLayout` says of `model`, or where they cannot be read.
    """
    try:
        is_here = Path(folder).is_dir()
        path = Path(folder) if is_here else Path(snapshot_download(str(folder), local_files_only=True))
        stored = StoredWeights(path, FileLayout.of(model))
    except (OSError, ValueError, KeyError):
        return None
    return stored if stored.fits(model) else None
