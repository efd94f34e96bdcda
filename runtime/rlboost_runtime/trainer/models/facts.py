"""A job's model as its configuration describes it: no weight is loaded.

The model is built on torch's meta device, so that even a large one costs no memory here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.file_tensors import FileLayout
from rlboost_runtime.job import Job, TinyModel
from rlboost_runtime.trainer.data.chat import PromptEncoder
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as its files describe it."""

    num_parameters: int
    """Tied ones once."""
    encode: PromptEncoder
    """What the model reads of a prompt, and its token ids."""
    has_chat_template: bool = False


def look_at_model(job: Job) -> ModelFacts:
    """Return what the job's model is.

    Of a folder, tokenizer, architecture and the names of its weights are checked. Raises `ConfigError` for
    one that could not be trained, and `LookupError` for a Hugging Face id whose files are not here.
    """
    model, tokenizer = _from_files(job.model) if isinstance(job.model, str) else _tiny(job, job.model)
    return ModelFacts(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        encode=PromptEncoder(tokenizer),
        has_chat_template=tokenizer.chat_template is not None,
    )


def _tiny(job: Job, tiny: TinyModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with torch.device("meta"):
        model = make_model(tiny, job.max_context_tokens)
    return model, make_tokenizer()


def _from_files(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = Path(name)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as exc:
        if not folder.is_dir():
            raise LookupError(name) from exc
        raise ConfigError(
            f"{name} cannot be loaded: {str(exc).splitlines()[0]}",
            "give a folder with config.json, safetensors and a tokenizer",
        ) from exc
    if folder.is_dir() and not tokenizer.encode("abc 123"):  # transformers makes an empty one of no files
        raise ConfigError(
            f"{name} has no tokenizer: nothing becomes no tokens", "copy its tokenizer files into the folder"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call] # theirs
    except (ValueError, KeyError) as exc:
        raise ConfigError(
            f"{name} is no causal language model that transformers knows: {str(exc).splitlines()[0]}",
            "give another model",
        ) from exc
    assert isinstance(model, PreTrainedModel)
    model.tie_weights()
    if folder.is_dir():
        _check_weights(folder, model)
    return model, tokenizer


def _check_weights(folder: Path, model: PreTrainedModel) -> None:
    """Raise `ConfigError` where the folder's files lack weights of the model: they would be left random."""
    stored, layout = _stored_names(folder), FileLayout.of(model)
    tied = {name for group in _tied(model) if set(group) & stored for name in group}
    wanted = {name for name, _ in model.named_parameters()} - stored - tied  # any may be stored as it is
    missing = sorted(part.name for name in wanted for part in layout.parts(name) if part.name not in stored)
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights of its model, such as {missing[0]}",
            "copy the folder again: its safetensors do not belong to its config.json",
        )


def _stored_names(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            return set(json.loads(index.read_bytes())["weight_map"])
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            return set(file.keys())
    except (OSError, ValueError, KeyError, SafetensorError) as exc:
        raise ConfigError(
            f"the weights in {folder} cannot be read: {str(exc).splitlines()[0]}",
            "copy the folder again, with its model.safetensors",
        ) from exc


def _tied(model: PreTrainedModel) -> list[list[str]]:
    """Names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
