"""A model as it was at one moment, in main memory: it can be written while training goes on.

What is written is what `Policy.load` reads: HF format, float32, exactly; with LoRA the frozen model and its
adapters beside it. It shares no memory with the model.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlboost_runtime.trainer import lora as adapters


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """Weights by name, whole, tied ones once; and the small files of the folder."""

    state: Mapping[str, Tensor]
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Write everything into `folder`."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if adapters.adapters(self.state):
            adapters.save(self.state, folder)
        model = {name: tensor.contiguous() for name, tensor in adapters.frozen(self.state).items()}
        save_file(model, folder / "model.safetensors", metadata={"format": "pt"})


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
