"""Logprobs and entropies of chosen tokens from hidden states, without the logits of all positions at once.

The logits of a long batch are its largest tensor by far (16,384 tokens x 151,936 words x 4 bytes = 10 GB),
and training needs one number of each row. So rows are handled in chunks; the backward pass makes a chunk's
logits again, unless all of them fit into `KEEP_BYTES`. The softmax is always in float32.

Shape suffixes: N tokens, C tokens of a chunk, V vocabulary, E width of the hidden states.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

KEEP_BYTES = 128 * 1024 * 1024
"""Log-softmax kept for the backward pass instead of being made anew: little beside a model whose logits are
this small, and it saves a quarter of the head's arithmetic."""

CHUNK_BYTES = 64 * 1024 * 1024
"""float32 logits of one chunk: large enough for an efficient matrix product on a CPU."""

GPU_CHUNK_BYTES = 512 * 1024 * 1024
"""Likewise on a GPU, where each chunk also reads and writes the head's whole gradient."""


def token_logprobs(
    hidden_NE: Tensor, head_VE: Tensor, targets_N: Tensor, temperature: float, *, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Return logprobs_N of the targets under softmax(hidden @ head.T / temperature), and the
    entropies_N in nats, both with gradient by hidden states and head, in float32.

    The products run in the hidden states' dtype; the head is cast to it. `wide`: their results are float32
    at once (`wide_product`).
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NE, head_VE, targets_N, temperature, wide
    )
    return found


def wide_product(one: Tensor, other: Tensor, onto: Tensor | None = None) -> Tensor:
    """Return the product of two bfloat16 matrices in float32, added to `onto` in place where that is given.

    For GPUs: the product is summed in float32 anyway, and this spares a pass over it in each dtype.
    """
    if onto is None:
        return torch.mm(one, other, out_dtype=torch.float32)
    return torch.addmm(onto, one, other, out_dtype=torch.float32, out=onto)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        hidden_NE: Tensor,
        head_VE: Tensor,
        targets_N: Tensor,
        temperature: float,
        wide: bool,
    ) -> tuple[Tensor, Tensor]:
        head = head_VE.detach().to(hidden_NE.dtype)
        logprobs_N = torch.empty(hidden_NE.shape[0], dtype=torch.float32, device=hidden_NE.device)
        entropies_N = torch.empty_like(logprobs_N)
        kept: list[Tensor] = []
        keep = logprobs_N.numel() * head.shape[0] * 4 <= KEEP_BYTES
        for rows in _chunks(hidden_NE, head.shape[0]):
            log_CV = _log_softmax(hidden_NE[rows], head, temperature, wide=wide)
            logprobs_N[rows] = log_CV.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1)
            entropies_N[rows] = -torch.linalg.vecdot(log_CV.exp(), log_CV)
            if keep:
                kept.append(log_CV)
        ctx.save_for_backward(hidden_NE, head_VE, targets_N, *kept)
        ctx.temperature, ctx.wide = temperature, wide
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # autograd's context
        hidden_NE, head_VE, targets_N, *kept = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        head = head_VE.detach().to(hidden_NE.dtype)
        by_logprob_N = torch.zeros(hidden_NE.shape[:1], device=hidden_NE.device)
        gradient_N = (by_logprob_N if gradients[0] is None else gradients[0]) / ctx.temperature
        by_entropy_N = None if gradients[1] is None else gradients[1] / ctx.temperature
        by_hidden = torch.empty_like(hidden_NE) if needs_hidden else None
        by_head = torch.zeros_like(head_VE, dtype=torch.float32) if needs_head else None
        for number, rows in enumerate(_chunks(hidden_NE, head.shape[0])):
            log_CV = (
                kept[number] if kept else _log_softmax(hidden_NE[rows], head, ctx.temperature, wide=ctx.wide)
            )
            by_logits = log_CV.exp().mul_(-gradient_N[rows].unsqueeze(1))
            by_logits.scatter_add_(1, targets_N[rows].unsqueeze(1), gradient_N[rows].unsqueeze(1))
            if by_entropy_N is not None:  # dH / dz = -p (log p + H)
                spread_CV = log_CV - torch.linalg.vecdot(log_CV.exp(), log_CV).unsqueeze(1)
                by_logits -= log_CV.exp() * spread_CV * by_entropy_N[rows].unsqueeze(1)
            by_logits = by_logits.to(hidden_NE.dtype)
            if by_hidden is not None:
                by_hidden[rows] = by_logits @ head
            if by_head is not None and ctx.wide:
                wide_product(by_logits.T, hidden_NE[rows], onto=by_head)
            elif by_head is not None:
                by_head += by_logits.T @ hidden_NE[rows]
        return by_hidden, None if by_head is None else by_head.to(head_VE.dtype), None, None, None


def _log_softmax(hidden_CE: Tensor, head_VE: Tensor, temperature: float, *, wide: bool) -> Tensor:
    logits_CV = wide_product(hidden_CE, head_VE.T) if wide else (hidden_CE @ head_VE.T).float()
    if temperature != 1.0:
        logits_CV /= temperature
    return torch.log_softmax(logits_CV, dim=-1)


def _chunks(hidden_NE: Tensor, vocabulary: int) -> list[slice]:
    num_tokens = hidden_NE.shape[0]
    size = max(1, (GPU_CHUNK_BYTES if hidden_NE.is_cuda else CHUNK_BYTES) // (4 * vocabulary))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def scored_by_liger(hidden_NE: Tensor, head_VE: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
    """Return `token_logprobs`' logprobs_N without gradient, by Liger's fused linear cross-entropy.

    It keeps a chunk's logits in registers where ours passes over them several times. It has no entropies, so
    it scores (old logprobs, the reference's) and does not train. Raises `ImportError` without the package.
    """
    name = "liger_kernel.transformers.functional"  # not a dependency
    fused = importlib.import_module(name).liger_fused_linear_cross_entropy
    with torch.no_grad():
        lost_N: Tensor = fused(
            hidden_NE / temperature, head_VE.to(hidden_NE.dtype), targets_N, reduction="none"
        )
    return -lost_N.float()
