"""Facts about the model in a folder of weights, read without loading it. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Tensors of a file: dtype as safetensors spells it and shape, by name."""


class Unreadable(ValueError):
    """The folder does not hold what it should; the message explains what is wrong."""


def config_text(folder: Path) -> str:
    """Return the folder's configuration; equal text means the same model and the same stop tokens."""
    return json.dumps([read_config(folder), stop_token_ids(folder)], sort_keys=True)


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json`, whose values are the model family's own. Raises `Unreadable`."""
    return _read_object(folder / CONFIG_FILE)


def stop_token_ids(folder: Path) -> list[int]:
    """Return the token ids that end a response of this model: `eos_token_id` of its generation configuration,
    else of its model configuration; none if neither gives them."""
    for name in (GENERATION_FILE, CONFIG_FILE):
        path = folder / name
        found = _read_object(path).get("eos_token_id") if path.exists() else None
        if found is not None:
            return sorted({found} if isinstance(found, int) else set(found))
    return []


def read_header(path: Path) -> Header:
    """Return the tensors of a safetensors file. Raises `Unreadable`."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise Unreadable(f"{path.name} is no safetensors file: a header of {length} bytes")
            entries = json.loads(file.read(length))
            header = {
                str(name): (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
                for name, entry in entries.items()
                if name != "__metadata__"
            }
            end = max((int(e["data_offsets"][1]) for n, e in entries.items() if n in header), default=0)
        size = path.stat().st_size
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
        raise Unreadable(f"{path.name} is no safetensors file: {exc}") from exc
    if size != 8 + length + end:
        raise Unreadable(f"{path.name} has {size} bytes, its header says {8 + length + end}")
    return header


def kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int:
    """Return the KV cache's bytes per token of a full-attention model. Raises `Unreadable`."""
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim * _DTYPE_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as exc:
        raise Unreadable(f"{CONFIG_FILE} does not say how large the KV cache is: {exc}") from exc


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise Unreadable(f"{path.name} cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise Unreadable(f"{path.name} holds no object")
    return found
