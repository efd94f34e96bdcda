"""A random model of more than 100 M parameters, for servers that are measured and not listened to."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_model(folder: Path) -> int:
    """Write the model into a new folder, as a weight version has it; return its number of parameters."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    config = Qwen3Config.from_dict(CONFIG | {"architectures": ["Qwen3ForCausalLM"]})
    model = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call] # theirs
    config.save_pretrained(folder)
    state = {name: t.clone() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors")
    return sum(t.numel() for t in state.values())
