"""What a weight version consists of, made from any Hugging Face causal LM: files, tied names, the probe.

Nothing here changes the model; its mode (train or eval) is as before afterwards.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.weights.manifest import Probe, Tied

_SCRATCH = ".scratch-"

PROBE_TOKENS = 8
"""Length of the greedy continuation in a probe: eight forward passes, and enough to tell versions apart."""

PROBE_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.25}
"""Nats by which an engine's probe logprobs may differ: kernels sum in another order; bfloat16 rounds to 8
bits."""


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder below `parent`, gone afterwards. What a killed process left there is deleted
    first, since a run has one trainer."""
    for left in parent.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=_SCRATCH) as name:
        yield Path(name)


def write_version(folder: Path, model: PreTrainedModel, state: Mapping[str, Tensor], dtype: str) -> None:
    """Write `state` as model.safetensors in `dtype`, with the model's config.json and generation_config.json.

    `state`: all weights by name, whole, tied ones once. The same weights give the same bytes.
    """
    kind = getattr(torch, dtype)
    tensors = {
        name: tensor.to(kind if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in state.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, data in version_configs(model, dtype).items():
        (folder / name).write_bytes(data)


def version_configs(model: PreTrainedModel, dtype: str) -> dict[str, bytes]:
    """Return a version's config.json and generation_config.json."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    assert model.generation_config is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder)
        model.generation_config.to_json_file(folder / "generation_config.json")
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def untied_state(model: PreTrainedModel, tied: Sequence[Tied]) -> dict[str, Tensor]:
    """Return the model's weights on the CPU, tied ones once; they may be the model's own memory."""
    names = {entry.name for entry in tied}
    return {
        name: tensor.detach().to("cpu") for name, tensor in model.state_dict().items() if name not in names
    }


def find_tied(model: PreTrainedModel) -> list[Tied]:
    """Return the parameters that share another one's memory."""
    first: dict[tuple[int, torch.Size], str] = {}
    found = []
    for name, tensor in model.state_dict().items():
        owner = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if owner != name:
            found.append(Tied(name, owner))
    return found


@torch.no_grad()
def greedy_probe(
    model: PreTrainedModel, token_ids: Sequence[int], stop_token_ids: frozenset[int], dtype: str
) -> Probe:
    """Return the greedy continuation of `token_ids` with logprobs at temperature 1, up to end-of-text."""
    sequence, logprobs = list(token_ids), list[float]()
    trained = [module for module in model.modules() if module.training]
    torch.nn.Module.eval(model)
    try:
        while len(logprobs) < PROBE_TOKENS:
            logits = model(torch.tensor([sequence], device=model.device), use_cache=False).logits[0, -1]
            log_V = torch.log_softmax(logits.float(), dim=-1)
            best = int(log_V.argmax())
            sequence.append(best)
            logprobs.append(float(log_V[best]))
            if best in stop_token_ids:
                break
    finally:
        for module in trained:  # one by one: a part of it may be kept in eval mode
            module.training = True
    new = tuple(sequence[len(token_ids) :])
    return Probe(tuple(token_ids), new, tuple(logprobs), PROBE_TOLERANCE[dtype])


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the generation config's, else the tokenizer's."""
    found: Any = getattr(model.generation_config, "eos_token_id", None)  # int, list of int, or None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
