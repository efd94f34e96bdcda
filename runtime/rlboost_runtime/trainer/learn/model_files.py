"""The files of a model's checkpoint and weight versions, for any Hugging Face causal LM; and the probe.

Nothing here changes the model; its mode (train or eval) is as before afterwards.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.engines.base import greedy_continuation
from rlboost_runtime.weights.manifest import Probe, Tied

PROBE_TOKENS = 8
"""Length of the greedy continuation in a probe: eight forward passes, and enough to tell versions apart."""

PROBE_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.25}
"""Nats by which an engine's probe logprobs may differ: kernels sum in another order; bfloat16 rounds to 8
bits."""


def small_files(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the files beside the weights: config, generation config, tokenizer. Training changes none."""
    config = copy.deepcopy(model.config)
    config.dtype = "float32"
    config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.to_json_file(folder / "generation_config.json")
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


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


def find_tied(model: PreTrainedModel) -> list[Tied]:
    """Return the parameters that share another one's memory."""
    first: dict[torch.nn.Parameter, str] = {}
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(parameter, name)
        if owner != name:
            found.append(Tied(name, owner))
    return found


@torch.no_grad()
def greedy_probe(
    next_logprobs: Callable[[list[int]], Tensor],
    token_ids: Sequence[int],
    stop_token_ids: frozenset[int],
    dtype: str,
) -> Probe:
    """Return the greedy continuation of `token_ids` with logprobs at temperature 1, up to end-of-text.

    `next_logprobs` returns log_V of the token that follows a sequence.
    """
    new, logprobs = greedy_continuation(next_logprobs, token_ids, PROBE_TOKENS, stop_token_ids)
    return Probe(tuple(token_ids), tuple(new), tuple(logprobs), PROBE_TOLERANCE[dtype])


def next_logprobs(model: PreTrainedModel, sequence: Sequence[int]) -> Tensor:
    """Return log_V of the token that `model` in eval mode gives after a sequence."""
    with _in_eval_mode(model):
        logits = model(torch.tensor([sequence], device=model.device), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)


@contextmanager
def _in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    trained = [module for module in model.modules() if module.training]
    torch.nn.Module.eval(model)
    try:
        yield
    finally:
        for module in trained:  # one by one: a part of it may be kept in eval mode
            module.training = True


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the generation config's, else the tokenizer's."""
    found: Any = getattr(model.generation_config, "eos_token_id", None)  # int, list of int, or None
    if found is None:
        found = tokenizer.eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
