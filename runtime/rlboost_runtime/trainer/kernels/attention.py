"""Causal attention over sequences of several lengths, with or without a sliding window.

On padded rows it is `scaled_dot_product_attention`: causal attention never looks at padding on the right.
With a window of W tokens the rows are cut into blocks of W, each of which sees itself and the one before: no
mask is larger than W x 2 W, and it is the same for all blocks. On a packed row it is FlashAttention's
variable-length kernel, as torch has it.

Shape suffixes: B sequences, L the longest one's positions, S all positions together, H heads, D width of a
head; W tokens of a window, K blocks of W.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """Return causal attention over each of the rows [B, H, L, D]; `window`: how many tokens one sees, itself
    included."""
    if window is not None or (query.is_cuda and query.dtype is torch.float32):
        key, value = (_for_each_query(each, query.shape[1]) for each in (key, value))
    if window is None:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    if window >= query.shape[2]:
        return padded_attention(query, key, value, scaling, None)
    rows, length = query.shape[0], query.shape[2]
    queries, keys, values = (_in_blocks(each, window) for each in (query, key, value))
    first = padded_attention(queries[:, 0], keys[:, 0], values[:, 0], scaling, None)
    behind = torch.arange(window, device=query.device)[:, None] - torch.arange(
        -window, window, device=query.device
    )
    rest = nn.functional.scaled_dot_product_attention(
        queries[:, 1:].flatten(0, 1), _with_former(keys), _with_former(values),
        attn_mask=(behind >= 0) & (behind < window), scale=scaling,
    )  # fmt: skip
    blocks = torch.cat([first[:, None], rest.view(rows, -1, *rest.shape[1:])], dim=1)
    found: Tensor = blocks.transpose(1, 2).flatten(2, 3)[:, :, :length]
    return found


def _for_each_query(heads: Tensor, num_queries: int) -> Tensor:
    """Repeat the heads of keys or values: with a mask, or in float32, torch has a kernel for GPUs that never
    holds all scores only where there are as many of them as of queries."""
    return heads.repeat_interleave(num_queries // heads.shape[1], dim=1)


def _in_blocks(heads_BHLD: Tensor, window: int) -> Tensor:
    """[B, H, L, D] -> [B, K, H, W, D], padded on the right."""
    padded = nn.functional.pad(heads_BHLD, (0, 0, 0, -heads_BHLD.shape[2] % window))
    return padded.reshape(*padded.shape[:2], -1, window, padded.shape[3]).transpose(1, 2)


def _with_former(blocks: Tensor) -> Tensor:
    """[B, K, H, W, D] -> [B x (K - 1), H, 2 W, D]: each block but the first after the one before it."""
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=3).flatten(0, 1)


@cache
def varlen_attention() -> Callable[..., object] | None:
    """Return torch's variable-length attention; None where this torch has none with a window (before 2.11):
    attention then runs on padded rows."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # flash attention, on GPUs only
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= _parameters(varlen_attn) else None


def _parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters)


def packed_attention(
    query_SHD: Tensor,
    key_SHD: Tensor,
    value_SHD: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return attention within each sequence of a packed row, by the variable-length kernel.

    `starts`: int32 [B + 1], where each sequence begins, and the row's length. `window` as in
    `padded_attention`.
    """
    varlen_attn = varlen_attention()
    if varlen_attn is None:
        raise ImportError("this torch has no variable-length attention with windows")
    grouped = {}
    if query_SHD.shape[1] != key_SHD.shape[1]:
        if "enable_gqa" in _parameters(varlen_attn):
            grouped = {"enable_gqa": True}
        else:  # torch 2.11
            key_SHD, value_SHD = (_for_each_query(each, query_SHD.shape[1]) for each in (key_SHD, value_SHD))
    found = varlen_attn(
        query_SHD, key_SHD, value_SHD, starts, starts, longest, longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), **grouped,
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found
