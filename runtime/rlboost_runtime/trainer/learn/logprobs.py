"""The model as the trainer uses it: packed sequences in, logprobs of the responses' tokens out.

It is one module, because a sharded model's outermost parameters (embedding, final norm, head) are whole only
inside the forward pass of the module that owns them. Models that cannot take packed rows or whose head is not
a plain matrix are run on padded rows with all their logits: slower, same results.

Shape suffixes: B sequences, L positions of the longest, S positions of the packed row, N predicted tokens, V
vocabulary.

Logprobs and entropies of chosen tokens from hidden states, without the logits of all positions at once.

The logits of a long batch are its largest tensor by far (16,384 tokens x 151,936 words x 4 bytes = 10 GB),
and training needs one number of each row. So rows are handled in chunks; the backward pass makes a chunk's
logits again, unless all of them fit into `KEEP_BYTES`. The softmax is always in float32.

Shape suffixes: N tokens, C tokens of a chunk, V vocabulary, E width of the hidden states.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlboost_runtime.logs import event
from rlboost_runtime.trainer.learn.packing import PackedBatch, packed_row, use_packed_attention

log = logging.getLogger(__name__)

HEAD_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)
"""Settings by which models change their logits after the head."""


class LogprobModel(nn.Module):
    """Computes logprobs with the model's current weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = torch.float32
        """bfloat16 runs the arithmetic in it and leaves the weights as they are."""
        self.autocast = False
        """True if this module casts; a sharded model's weights are cast by FSDP."""
        self.entropy_has_gradient = False
        """True where entropies are trained: on padded rows that takes the logits' memory twice more."""
        self.why_not_packed = self._odd_head() or use_packed_attention(model)
        if self.why_not_packed:
            event(log, "policy.padded", why=self.why_not_packed)

    def forward(
        self, batch: PackedBatch, temperature: float, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs_N and entropies_N, both with gradient, of the batch's predicted tokens, in
        float32.

        `whole`: log_NV of the whole vocabulary instead of logprobs_N.
        """
        hidden_NE = self._hidden(batch)
        if hidden_NE is not None and not whole:
            with torch.autocast(hidden_NE.device.type, enabled=False):
                return token_logprobs(hidden_NE, self._head(), batch.targets_N, temperature)
        if hidden_NE is None:
            logits_NV = self._padded(batch, self.model, "logits")
        else:
            logits_NV = hidden_NE @ self._head().to(hidden_NE.dtype).T
        log_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
        logprobs = log_NV if whole else log_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
        with torch.set_grad_enabled(self.entropy_has_gradient and torch.is_grad_enabled()):
            return logprobs, -(log_NV.exp() * log_NV).sum(dim=-1)

    def _hidden(self, batch: PackedBatch) -> Tensor | None:
        if self.why_not_packed:
            return None
        with packed_row(), self._precision(batch):
            output = self.model.base_model(
                input_ids=batch.ids_1S,
                position_ids=batch.positions_1S,
                packing=batch.packing,
                use_cache=False,
            )
        hidden_NE: Tensor = output.last_hidden_state[0].index_select(0, batch.predicting_N)
        return hidden_NE.to(self.compute_dtype)

    def _head(self) -> Tensor:
        weight = self.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        assert isinstance(weight, Tensor)
        return weight

    def _padded(self, batch: PackedBatch, model: nn.Module, output: str) -> Tensor:
        """Return the rows of `model`'s output that predict, by way of padded rows."""
        packing = batch.packing
        real_BL = torch.zeros_like(packing.spread_BL).flatten().index_fill(0, packing.gather_S, 1)
        with self._precision(batch):
            found = getattr(
                model(
                    input_ids=batch.ids_1S[0][packing.spread_BL],
                    attention_mask=real_BL.view_as(packing.spread_BL),
                    use_cache=False,
                ),
                output,
            )
        flat: Tensor = found.reshape(-1, found.shape[-1])
        return flat.index_select(0, packing.gather_S[batch.predicting_N])

    def _odd_head(self) -> str | None:
        return _odd_head(self.model)

    def _precision(self, batch: PackedBatch) -> torch.autocast:
        return torch.autocast(batch.ids_1S.device.type, self.compute_dtype, enabled=self.autocast)


VALUE_HEAD = "value_head"
"""Name of a critic's last weights in its model: a vector of the hidden states' width."""


def give_value_head(model: PreTrainedModel) -> None:
    """Replace the model's head by one that gives a number per token, 0 at first."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    (name,) = (name for name, module in model.named_modules() if module is head)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Identity())
    width = model.config.get_text_config().hidden_size
    model.register_parameter(VALUE_HEAD, nn.Parameter(torch.zeros(width)))


class ValueModel(LogprobModel):
    """Computes a critic's values, in the place of logprobs; its entropies are 0."""

    def forward(
        self, batch: PackedBatch, temperature: float, *, whole: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return values_N: of each predicted token, what is to come before it is chosen. Nothing depends on
        `temperature`."""
        hidden_NE = self._hidden(batch)
        if hidden_NE is None:
            hidden_NE = self._padded(batch, self.model.base_model, "last_hidden_state")
        with torch.autocast(hidden_NE.device.type, enabled=False):
            values_N = hidden_NE.float() @ getattr(self.model, VALUE_HEAD).float()
        return values_N, torch.zeros_like(values_N)

    def _odd_head(self) -> str | None:
        return None


def _odd_head(model: PreTrainedModel) -> str | None:
    """Return why logits are not simply hidden states times a matrix; None if they are."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return f"{type(model).__name__}'s head is not a plain matrix"
    config = model.config.get_text_config()
    scales = [name for name in HEAD_SCALES if getattr(config, name, None) not in (None, 1.0)]
    return f"{type(model).__name__} has {scales[0]}" if scales else None


KEEP_BYTES = 128 * 1024 * 1024
"""Log-softmax kept for the backward pass instead of being made anew: little beside a model whose logits are
this small, and it saves a quarter of the head's arithmetic."""

CHUNK_BYTES = 64 * 1024 * 1024
"""float32 logits of one chunk: large enough for an efficient matrix product."""


def token_logprobs(
    hidden_NE: Tensor, head_VE: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return logprobs_N of the targets under softmax(hidden @ head.T / temperature), and the
    entropies_N in nats, both with gradient by hidden states and head, in float32.

    The products run in the hidden states' dtype; the head is cast to it.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NE, head_VE, targets_N, temperature
    )
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        hidden_NE: Tensor,
        head_VE: Tensor,
        targets_N: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        head = head_VE.detach().to(hidden_NE.dtype)
        logprobs_N = torch.empty(hidden_NE.shape[0], dtype=torch.float32, device=hidden_NE.device)
        entropies_N = torch.empty_like(logprobs_N)
        kept: list[Tensor] = []
        keep = logprobs_N.numel() * head.shape[0] * 4 <= KEEP_BYTES
        for rows in _chunks(hidden_NE.shape[0], head.shape[0]):
            log_CV = _log_softmax(hidden_NE[rows], head, temperature)
            logprobs_N[rows] = log_CV.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1)
            entropies_N[rows] = -torch.linalg.vecdot(log_CV.exp(), log_CV)
            if keep:
                kept.append(log_CV)
        ctx.save_for_backward(hidden_NE, head_VE, targets_N, *kept)
        ctx.temperature = temperature
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
        for number, rows in enumerate(_chunks(hidden_NE.shape[0], head.shape[0])):
            log_CV = kept[number] if kept else _log_softmax(hidden_NE[rows], head, ctx.temperature)
            by_logits = log_CV.exp().mul_(-gradient_N[rows].unsqueeze(1))
            by_logits.scatter_add_(1, targets_N[rows].unsqueeze(1), gradient_N[rows].unsqueeze(1))
            if by_entropy_N is not None:  # dH / dz = -p (log p + H)
                spread_CV = log_CV - torch.linalg.vecdot(log_CV.exp(), log_CV).unsqueeze(1)
                by_logits -= log_CV.exp() * spread_CV * by_entropy_N[rows].unsqueeze(1)
            by_logits = by_logits.to(hidden_NE.dtype)
            if by_hidden is not None:
                by_hidden[rows] = by_logits @ head
            if by_head is not None:
                by_head += by_logits.T @ hidden_NE[rows]
        return by_hidden, None if by_head is None else by_head.to(head_VE.dtype), None, None


def _log_softmax(hidden_CE: Tensor, head_VE: Tensor, temperature: float) -> Tensor:
    logits_CV = (hidden_CE @ head_VE.T).float()
    if temperature != 1.0:
        logits_CV /= temperature
    return torch.log_softmax(logits_CV, dim=-1)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
