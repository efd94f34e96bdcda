"""Several sequences in one row, without padding.

Everything that works token by token (most of a transformer's arithmetic) runs on the row as it is; attention
is kept within each sequence. On a GPU that is a variable-length kernel; elsewhere attention alone, for its
own duration, spreads the sequences over padded rows: causal attention never looks at padding on the right, so
no mask is needed and the results are those of each sequence alone.

Shape suffixes: B sequences, L the longest one's positions, S all positions together, N predicted tokens, T
the longest response's tokens, H heads, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "rlboost_packed"
"""Name of the attention under which `transformers` finds ours."""

_is_packed: ContextVar[bool] = ContextVar("is_packed", default=False)

Item = TypeVar("Item")
Ids = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Packing:
    """The positions of the sequences in a packed row."""

    starts: Tensor
    """int32 [B + 1]: where each sequence begins, and the row's length."""
    longest: int
    spread_BL: Tensor
    """The row's position of each padded place; padding repeats position 0."""
    gather_S: Tensor
    """The padded place, counted through all rows, of each of the row's positions."""

    @property
    def num(self) -> int:
        """Number of sequences."""
        return self.starts.numel() - 1

    def to(self, device: torch.device) -> Packing:
        """Return it on `device`."""
        moved = (each.to(device) for each in (self.starts, self.spread_BL, self.gather_S))
        starts, spread_BL, gather_S = moved
        return replace(self, starts=starts, spread_BL=spread_BL, gather_S=gather_S)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The model's input, and the tokens whose logprobs are wanted."""

    ids_1S: Tensor
    positions_1S: Tensor
    packing: Packing
    predicting_N: Tensor
    """Positions of the row that predict a response's token, response after response."""
    targets_N: Tensor
    """The predicted tokens."""
    places_N: Tensor
    """Where each belongs in a [B, T] table, counted through its rows."""
    num_columns: int
    """T."""

    def to(self, device: torch.device) -> PackedBatch:
        """Return it on `device`."""
        return PackedBatch(
            self.ids_1S.to(device),
            self.positions_1S.to(device),
            self.packing.to(device),
            self.predicting_N.to(device),
            self.targets_N.to(device),
            self.places_N.to(device),
            self.num_columns,
        )

    def table(self, values_N: Tensor) -> Tensor:
        """Return values_BT of values per predicted token, 0 elsewhere; keeps the gradient."""
        flat = values_N.new_zeros(self.packing.num * self.num_columns)
        return flat.index_put((self.places_N,), values_N).view(self.packing.num, self.num_columns)


def pack(prompts: Sequence[Ids], responses: Sequence[Ids]) -> PackedBatch:
    """Return prompt + response of each sequence in one row; the last token predicts nothing and is left out.

    Prompts have at least one token.
    """
    answers = [np.asarray(response, np.int64) for response in responses]
    inputs = [
        np.concatenate([np.asarray(prompt, np.int64), answer])[:-1]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    starts = [0]
    for row in inputs:
        starts.append(starts[-1] + len(row))
    longest, widest = max(map(len, inputs)), max(1, *map(len, responses))
    spread = torch.zeros(len(inputs), longest, dtype=torch.long)
    gather, predicting, places = [], [], []
    for i, row in enumerate(inputs):
        spread[i, : len(row)] = torch.arange(starts[i], starts[i + 1])
        gather.append(torch.arange(len(row)) + i * longest)
        first = starts[i] + len(prompts[i]) - 1
        predicting.append(torch.arange(first, first + len(responses[i])))
        places.append(torch.arange(len(responses[i])) + i * widest)
    return PackedBatch(
        ids_1S=torch.from_numpy(np.concatenate(inputs)).unsqueeze(0),
        positions_1S=torch.cat([torch.arange(len(row)) for row in inputs]).unsqueeze(0),
        packing=Packing(torch.tensor(starts, dtype=torch.int32), longest, spread, torch.cat(gather)),
        predicting_N=torch.cat(predicting),
        targets_N=torch.from_numpy(np.concatenate(answers)),
        places_N=torch.cat(places),
        num_columns=widest,
    )


def micro_batches(
    items: Sequence[Item], sizes: Sequence[int], budget: int, num_ranks: int = 1
) -> list[list[Item]]:
    """Return the items in batches of at most `budget` tokens each, as evenly filled as their number allows.

    Neighbours in length go together, so that attention's padding is little. An item above the budget is alone
    in its batch. The number of batches is what `num_ranks` ranks need to have equally many, where there are
    enough items for that. The same items give the same batches.
    """
    if not items:
        return []
    order = sorted(range(len(items)), key=lambda i: -sizes[i])
    total = sum(sizes)
    rounds = -(-total // (budget * num_ranks))
    even = -(-total // (rounds * num_ranks))
    room = min(budget, max(even, sizes[order[0]]))
    batches: list[list[Item]] = []
    filled = 0
    for i in order:
        if not batches or filled + sizes[i] > room:
            batches.append([])
            filled = 0
        batches[-1].append(items[i])
        filled += sizes[i]
    return batches


# --- attention ----------------------------------------------------------------------------------------------


def use_packed_attention(model: PreTrainedModel) -> str | None:
    """Make `model` accept packed rows; return the reason if it cannot, else None."""
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take its attention from outside"
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        return f"{type(model).__name__} has layers of kind {', '.join(sorted(kinds))}"
    model.set_attn_implementation(ATTENTION)
    return None


@contextmanager
def packed_row() -> Iterator[None]:
    """Within it, models build no attention mask: the packing defines what each token attends to."""
    token = _is_packed.set(True)
    try:
        yield
    finally:
        _is_packed.reset(token)


def _mask(*arguments: Any, **options: Any) -> Tensor | None:  # those of transformers' mask functions
    return None if _is_packed.get() else sdpa_mask(*arguments, **options)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    **options: Any,  # whatever else a model passes on
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it: query [1, H, S, D] -> [1, S, H, D]."""
    if packing is None:
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found, None
    query, key, value = _as_computed(query, key, value)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and varlen_attention() is not None:
        return _varlen(query, key, value, packing, scaling).unsqueeze(0), None
    if packing.num == 1:
        found = _causal(query, key, value, scaling).transpose(1, 2)
        return found, None
    found = _causal(
        _spread(query, packing), _spread(key, packing), _spread(value, packing), scaling
    ).transpose(1, 2)  # [B, L, H, D]
    return found.reshape(-1, *found.shape[2:]).index_select(0, packing.gather_S).unsqueeze(0), None


def _spread(heads_1HSD: Tensor, packing: Packing) -> Tensor:
    """[1, H, S, D] -> [B, H, L, D]."""
    rows = heads_1HSD[0].transpose(0, 1).index_select(0, packing.spread_BL.flatten())
    return rows.view(*packing.spread_BL.shape, *rows.shape[1:]).transpose(1, 2)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def _as_computed(*heads: Tensor) -> tuple[Tensor, ...]:
    """Return the heads in the dtype that attention computes in: under autocast rotary embeddings leave
    queries and keys in float32, which the variable-length kernel refuses."""
    device = heads[0].device.type
    if not torch.is_autocast_enabled(device):
        return heads
    return tuple(each.to(torch.get_autocast_dtype(device)) for each in heads)


@cache
def varlen_attention() -> Callable[..., object] | None:
    """Return torch's variable-length attention; None where this torch has none with a window and grouped
    heads: attention then runs on padded rows."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # flash attention, on GPUs only
    except ImportError:
        return None
    wanted = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if wanted <= set(inspect.signature(varlen_attn).parameters) else None


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    varlen_attn = varlen_attention()
    assert varlen_attn is not None
    query_SHD, key_SHD, value_SHD = (each[0].transpose(0, 1) for each in (query, key, value))
    found = varlen_attn(
        query_SHD, key_SHD, value_SHD, packing.starts, packing.starts, packing.longest, packing.longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
