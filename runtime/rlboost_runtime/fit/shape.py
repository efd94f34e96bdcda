"""The sizes of a transformer, from its config.json, a table of well-known models, or `{init: tiny}`.

Counted are decoders with gated MLPs (Qwen 2 and 3, Llama, Mistral and their likes), dense or with experts, of
which some layers may be dense and some experts shared. Of
other architectures the count is an estimate. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import TinyModel

_WITH_QK_NORM = ("qwen3", "gemma3", "olmo2", "olmo3")
"""How the `model_type` of those begins that normalise queries and keys, and keep what that needs."""
_FOUR_NORMS = ("gemma2", "gemma3")
"""Of those that have a norm before and after attention and MLP."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """What of a model decides its memory and arithmetic. Widths in elements."""

    hidden: int
    intermediate: int
    """Width of the MLP; of one expert where there are experts."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """True if the head is the embedding."""
    experts: int = 0
    """0: the MLP is dense."""
    active_experts: int = 1
    """Experts that compute a token."""
    has_qk_norm: bool = True
    shared: int = 0
    """Width of the experts that every token goes through, together."""
    dense_layers: int = 0
    """Layers of a mixture that have no experts."""
    dense_intermediate: int = 0
    """Width of their MLP."""
    num_norms: int = 2
    """Norms of a layer, without those of queries and keys."""
    positions: int | None = None
    """Longest context that its configuration allows, in tokens; None: not known."""

    @property
    def queries(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer; of a mixture, one with experts."""
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.hidden * self.experts
        if self.shared:  # with its gate
            mlp += 3 * self.hidden * self.shared + self.hidden
        return self._attention_parameters + mlp

    @property
    def _attention_parameters(self) -> int:
        """Parameters of a layer beside its MLP."""
        norms = self.num_norms * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)
        return 2 * self.hidden * (self.queries + self.keys) + norms

    @property
    def table(self) -> int:
        """Parameters of the embedding alone, or of the head alone."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters that belong to no layer: embedding, final norm and head."""
        return (1 if self.tied else 2) * self.table + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        dense = self._attention_parameters + 3 * self.hidden * self.dense_intermediate
        mixed = self.layers - self.dense_layers
        return self.root_parameters + mixed * self.layer_parameters + self.dense_layers * dense

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.keys

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of `rank` on every linear layer but the head. Experts are tensors of
        their own kind and get none."""
        wide = self.hidden + self.queries
        narrow = self.hidden + self.keys
        mlp = 0 if self.experts else 3 * (self.hidden + self.intermediate)
        return self.layers * rank * (2 * wide + 2 * narrow + mlp)


def shape_of_config(config: Mapping[str, Any]) -> TransformerShape:
    """Return the shape in a Hugging Face configuration; that of the text part, where there are several.

    Raises `KeyError`, `TypeError` or `ValueError` where it is none of a transformer.
    """
    config = config.get("text_config") or config
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    experts = int(
        config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    )
    width = config.get("moe_intermediate_size") if experts else None
    dense = _dense_layers(config) if experts else 0
    kind = str(config.get("model_type", ""))
    return TransformerShape(
        hidden=hidden,
        intermediate=int(width or config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings")),
        experts=experts,
        active_experts=int(config.get("num_experts_per_tok") or 1) if experts else 1,
        has_qk_norm=kind.startswith(_WITH_QK_NORM),
        shared=int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        dense_layers=dense,
        dense_intermediate=int(config["intermediate_size"]) if dense else 0,
        num_norms=4 if kind.startswith(_FOUR_NORMS) else 2,
        positions=_positions(config),
    )


def _dense_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers of a mixture have no experts: as Qwen's configurations say it."""
    named = set(config.get("mlp_only_layers") or ())
    every = int(config.get("decoder_sparse_step") or 1)
    return sum(n in named or (n + 1) % every != 0 for n in range(int(config["num_hidden_layers"])))


def _positions(config: Mapping[str, Any]) -> int | None:
    """Return the longest context, with what scaled rotary embeddings (YaRN and others) add to it."""
    longest = int(config.get("max_position_embeddings") or 0)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = float(scaling.get("original_max_position_embeddings") or longest)
    return max(longest, int(original * float(scaling.get("factor") or 1))) or None


def _qwen3(*numbers: int, tied: bool = False, experts: int = 0, active: int = 1) -> TransformerShape:
    """`numbers`: hidden, intermediate, layers, heads, KV heads."""
    hidden, intermediate, layers, heads, kv = numbers
    return TransformerShape(
        hidden, intermediate, layers, heads, kv, 128, 151_936, tied, experts, active, has_qk_norm=True
    )


def _plain(*numbers: int, tied: bool = False) -> TransformerShape:
    """`numbers`: hidden, intermediate, layers, heads, KV heads, head's width, vocabulary."""
    hidden, intermediate, layers, heads, kv, head_dim, vocabulary = numbers
    return TransformerShape(
        hidden, intermediate, layers, heads, kv, head_dim, vocabulary, tied, has_qk_norm=False
    )


KNOWN_MODELS: Mapping[str, TransformerShape] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12_288, 36, 32, 8),
    "Qwen/Qwen3-14B": _qwen3(5120, 17_408, 40, 40, 8),
    "Qwen/Qwen3-32B": _qwen3(5120, 25_600, 64, 64, 8),
    "Qwen/Qwen3-30B-A3B": _qwen3(2048, 768, 48, 32, 4, experts=128, active=8),
    "Qwen/Qwen2.5-0.5B": _plain(896, 4864, 24, 14, 2, 64, 151_936, tied=True),
    "Qwen/Qwen2.5-1.5B": _plain(1536, 8960, 28, 12, 2, 128, 151_936, tied=True),
    "Qwen/Qwen2.5-3B": _plain(2048, 11_008, 36, 16, 2, 128, 151_936, tied=True),
    "Qwen/Qwen2.5-7B": _plain(3584, 18_944, 28, 28, 4, 128, 152_064),
    "Qwen/Qwen2.5-Math-7B": _plain(3584, 18_944, 28, 28, 4, 128, 152_064),
    "Qwen/Qwen2.5-14B": _plain(5120, 13_824, 48, 40, 8, 128, 152_064),
    "Qwen/Qwen2.5-32B": _plain(5120, 27_648, 64, 40, 8, 128, 152_064),
    "meta-llama/Llama-3.2-1B": _plain(2048, 8192, 16, 32, 8, 64, 128_256, tied=True),
    "meta-llama/Llama-3.2-3B": _plain(3072, 8192, 28, 24, 8, 128, 128_256, tied=True),
    "meta-llama/Llama-3.1-8B": _plain(4096, 14_336, 32, 32, 8, 128, 128_256),
    "OpenRLHF/Llama-3-8b-sft-mixture": _plain(4096, 14_336, 32, 32, 8, 128, 128_256),
}
"""From the config.json of each repository on the Hugging Face hub; the same for -Base and -Instruct."""


def find_shape(model: str | TinyModel, base: Path = Path()) -> TransformerShape | None:
    """Return the shape of a job's model; None where no configuration of it is on this machine.

    A relative folder begins at `base`. Raises `ConfigError` for a configuration that is no transformer's.
    """
    if isinstance(model, TinyModel):
        hidden, heads = model.hidden_size, model.hidden_size // 32
        kv_heads = heads // 2 if heads % 2 == 0 else heads
        return TransformerShape(hidden, 2 * hidden, model.num_layers, heads, kv_heads, 32, 258, tied=True)
    folder = base / os.path.expanduser(model)
    file = folder / "config.json" if folder.is_dir() else cached_config(model)
    if file is None:
        return KNOWN_MODELS.get(model.removesuffix("-Base").removesuffix("-Instruct"))
    try:
        return shape_of_config(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(
            f"{file}: not the configuration of a transformer: {exc!r}", "give a folder in HF format"
        ) from exc


def cached_config(model: str) -> Path | None:
    """Return the config.json of a hub's model in the cache of `huggingface_hub`, which is not imported."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = (cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
