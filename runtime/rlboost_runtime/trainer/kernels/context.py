"""A packed row that several ranks share: context parallelism, by exchange of attention's heads.

Each rank has an equal part of the row's positions, and computes all that works token by token on them alone.
For attention alone the ranks exchange: each gets every position of its share of the heads, and gives the
answers back (all-to-all; DeepSpeed-Ulysses, arXiv 2309.14509). So attention is that of whole rows, with
windows and kernels, and heads bound the number of ranks.

Shape suffixes: S positions of the whole row, P of this rank's part, H heads, G this rank's share of them, D
width of a head, N predicted tokens of the row, M those of this rank's positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """This rank's place among those that share a row."""

    rank: int = 0
    num: int = 1
    group: ProcessGroup | None = None
    """None with one rank."""

    @classmethod
    def join(cls, rank: int, num_ranks: int, num: int) -> ContextGroup:
        """Return the place of `rank` where each `num` ranks in a row share; all ranks must call this."""
        if num == 1:
            return ALONE
        groups = [dist.new_group(list(range(first, first + num))) for first in range(0, num_ranks, num)]
        return cls(rank % num, num, cast(ProcessGroup, groups[rank // num]))

    @property
    def leads(self) -> bool:
        """True on the rank that counts what all of them computed."""
        return self.rank == 0

    def part(self, num_positions: int) -> slice:
        """Return this rank's part of a row, whose length `num` divides."""
        size = num_positions // self.num
        return slice(self.rank * size, (self.rank + 1) * size)

    def heads(self, heads_1HPD: Tensor) -> Tensor:
        """[1, H, P, D] -> [1, G, S, D]: every position of this rank's share of the heads. Fewer heads than
        ranks, those of keys and values, are repeated."""
        if self.num == 1:
            return heads_1HPD
        repeated = heads_1HPD.repeat_interleave(max(1, self.num // heads_1HPD.shape[1]), dim=1)
        _, num_heads, part, width = repeated.shape
        sent = repeated.view(self.num, num_heads // self.num, part, width)
        found = self._exchanged(sent)
        return found.transpose(0, 1).reshape(1, num_heads // self.num, -1, width)

    def positions(self, heads_1SGD: Tensor) -> Tensor:
        """[1, S, G, D] -> [1, P, H, D]: every head of this rank's positions."""
        if self.num == 1:
            return heads_1SGD
        _, length, num_heads, width = heads_1SGD.shape
        sent = heads_1SGD.reshape(self.num, length // self.num, num_heads, width)
        found = self._exchanged(sent)
        return found.transpose(0, 1).reshape(1, length // self.num, -1, width)

    def _exchanged(self, sent: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(sent, self.group))  # type: ignore[no-untyped-call]

    def whole(self, values_M: Tensor, sizes: list[int]) -> Tensor:
        """Return values_N (further dimensions stay) of all ranks' values, `sizes` of each. Every rank goes on
        with them alike, so each one's gradient is that of its own part."""
        if self.num == 1:
            return values_M
        return cast(Tensor, _Whole.apply(values_M, self, sizes))  # type: ignore[no-untyped-call]


ALONE = ContextGroup()


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: ProcessGroup) -> Tensor:  # autograd's context
        ctx.group = group
        return _exchanged(sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(sent: Tensor, group: ProcessGroup) -> Tensor:
    """Return, for each rank, what it sent to this one; row r of `sent` is for rank r."""
    sent = sent.contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


class _Whole(torch.autograd.Function):
    @staticmethod  # `Any`: autograd's context
    def forward(ctx: Any, mine: Tensor, context: ContextGroup, sizes: list[int]) -> Tensor:
        ctx.start = sum(sizes[: context.rank])
        ctx.stop = ctx.start + sizes[context.rank]
        rows = [mine.new_zeros(max(sizes), *mine.shape[1:]) for _ in sizes]
        padded = torch.cat([mine, mine.new_zeros(max(sizes) - len(mine), *mine.shape[1:])])
        dist.all_gather(rows, padded, group=context.group)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.start : ctx.stop], None, None
