"""Tiny random models of families that differ from the usual one: experts, windows of attention."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from rlboost_runtime.trainer.models.tiny import END_ID, PAD_ID, VOCABULARY

WINDOW = 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID,
}  # fmt: skip


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """A configuration of "qwen3_moe", "gemma3" (windows of `WINDOW` tokens, but for the last layer) or
    "mistral" (windows everywhere)."""
    shape = SHAPE | changes
    if family == "qwen3_moe":
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
        return Qwen3MoeConfig(**(shape | {"tie_word_embeddings": False} | experts | changes))
    if family == "gemma3":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        windows = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": WINDOW}
        return Gemma3TextConfig(**(shape | windows | {"query_pre_attn_scalar": 32} | changes))
    assert family == "mistral"
    return MistralConfig(**(shape | {"sliding_window": WINDOW} | changes))


def random_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in float32; other weights for other seeds."""
    config = config_of(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig(eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=True)
    return model
