"""Several sequences in one row, without padding.

Everything that works token by token (most of a transformer's arithmetic) runs on the row as it is; attention
is kept within each sequence. On a GPU that is a variable-length kernel; elsewhere attention alone, for its
own duration, spreads the sequences over padded rows: causal attention never looks at padding on the right, so
no mask is needed and the results are those of each sequence alone. In a layer with a window each token sees
the last tokens of its own sequence.

Shape suffixes: B sequences, L the longest one's positions, S all positions together, N predicted tokens, T
the longest response's tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlboost_runtime.trainer.kernels.attention import packed_attention, padded_attention
from rlboost_runtime.trainer.kernels.context import ALONE, ContextGroup

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
    by_kernel: bool = False
    """True if attention runs on the row as it is, by the variable-length kernel."""
    context: ContextGroup = ALONE
    """The ranks that share the row."""

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


def padded(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Return the batch with so many positions that `multiple` divides them; what is added is a sequence of
    its own, and predicts nothing."""
    ids, packing = batch.ids_1S, batch.packing
    length = ids.shape[1]
    more = -length % multiple
    if not more:
        return batch
    added = torch.arange(more, device=ids.device)
    end = torch.full((1,), length + more, device=ids.device, dtype=torch.int32)
    longest = max(packing.longest, more)
    spread_BL = nn.functional.pad(packing.spread_BL, (0, longest - packing.longest))
    last_L = nn.functional.pad(added + length, (0, longest - more))
    rows_S = packing.gather_S // packing.longest
    gather_S = packing.gather_S + rows_S * (longest - packing.longest)
    return replace(
        batch,
        ids_1S=nn.functional.pad(ids, (0, more)),
        positions_1S=torch.cat([batch.positions_1S, added[None]], 1),
        packing=replace(
            packing,
            starts=torch.cat([packing.starts, end]),
            longest=longest,
            spread_BL=torch.cat([spread_BL, last_L[None]]),
            gather_S=torch.cat([gather_S, added + packing.num * longest]),
        ),
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


_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers, in the words of `transformers`, whose attention we compute."""


def use_packed_attention(model: PreTrainedModel) -> str | None:
    """Make `model` accept packed rows; return the reason if it cannot, else None."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not take its attention from outside"
    if not getattr(model, "_supports_sdpa", True):
        return f"{name}'s attention is more than a softmax of products"
    kinds = set(getattr(config, "layer_types", None) or []) - _KINDS
    if kinds:
        return f"{name} has layers of kind {', '.join(sorted(kinds))}"
    odd = [each for each in ("attn_logit_softcapping", "use_bidirectional_attention")
           if getattr(config, each, None)]  # fmt: skip
    if odd:
        return f"{name} has {odd[0]}"
    model.set_attn_implementation(ATTENTION)
    return None


@contextmanager
def packed_row() -> Iterator[None]:
    """Within it, models build no attention mask: the packing defines what each token attends to.

    In its place a layer gets the length of its window, if it has one. So a layer computes what the model's
    own mask would have had it compute.
    """
    token = _is_packed.set(True)
    try:
        yield
    finally:
        _is_packed.reset(token)


def _mask(*arguments: Any, **options: Any) -> Tensor | None:  # those of transformers' mask functions
    if not _is_packed.get():
        return sdpa_mask(*arguments, **options)
    window = options.get("local_size")
    return None if window is None else torch.tensor(int(window))  # in main memory: read without waiting


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
    query, key, value = (packing.context.heads(each) for each in (query, key, value))
    return packing.context.positions(
        _packed(module, query, key, value, attention_mask, scaling, packing)
    ), None


def _packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    packing: Packing,
) -> Tensor:
    """Return attention over whole rows: query [1, H, S, D] -> [1, S, H, D]."""
    window = None if attention_mask is None else int(attention_mask)
    assert window is not None or not getattr(module, "is_sliding", False), "a layer's window is not known"
    if window is not None and window >= packing.longest:
        window = None
    if packing.by_kernel and query.dtype in (torch.bfloat16, torch.float16):
        query_SHD, key_SHD, value_SHD = (each[0].transpose(0, 1) for each in (query, key, value))
        found = packed_attention(
            query_SHD, key_SHD, value_SHD, packing.starts, packing.longest, scaling, window
        )
        return found.unsqueeze(0)
    if packing.num == 1:
        return padded_attention(query, key, value, scaling, window).transpose(1, 2)
    found = padded_attention(
        _spread(query, packing), _spread(key, packing), _spread(value, packing), scaling, window
    ).transpose(1, 2)  # [B, L, H, D]
    return found.reshape(-1, *found.shape[2:]).index_select(0, packing.gather_S).unsqueeze(0)


def _spread(heads_1HSD: Tensor, packing: Packing) -> Tensor:
    """[1, H, S, D] -> [B, H, L, D]."""
    rows = heads_1HSD[0].transpose(0, 1).index_select(0, packing.spread_BL.flatten())
    return rows.view(*packing.spread_BL.shape, *rows.shape[1:]).transpose(1, 2)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
