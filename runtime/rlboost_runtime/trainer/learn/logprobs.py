"""The model as the trainer uses it: packed sequences in, logprobs of the responses' tokens out.

It is one module, because a sharded model's outermost parameters (embedding, final norm, head) are whole only
inside the forward pass of the module that owns them. Models that cannot take packed rows or whose head is not
a plain matrix are run on padded rows with all their logits: slower, same results.

Shape suffixes: B sequences, L positions of the longest, S positions of the packed row, N predicted tokens, V
vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlboost_runtime.logs import event
from rlboost_runtime.trainer.kernels.casting import cast_weights
from rlboost_runtime.trainer.kernels.checks import PLAIN
from rlboost_runtime.trainer.kernels.context import ALONE
from rlboost_runtime.trainer.kernels.head import scored_by_liger, token_logprobs
from rlboost_runtime.trainer.learn.packing import PackedBatch, packed_row, padded, use_packed_attention

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
        """That of the arithmetic; the weights stay float32. `compute_in` sets it."""
        self.kernels = PLAIN
        """The fast forms of the arithmetic that are used; none until they were tried on the device."""
        self.entropy_has_gradient = False
        """True where entropies are trained: on padded rows that takes the logits' memory twice more."""
        self.context = ALONE
        """The ranks that share each packed row; all of them enter `forward` with the same batch."""
        self.why_not_packed = self._odd_head() or use_packed_attention(model)
        if self.why_not_packed:
            event(log, "policy.padded", why=self.why_not_packed)

    def compute_in(self, dtype: torch.dtype, *, casts: bool) -> None:
        """Compute in `dtype`. `casts`: this module casts its weights; a sharded model's are cast by FSDP."""
        self.compute_dtype = dtype
        if casts and dtype is not torch.float32:
            cast_weights(self, layers_of(self), dtype)

    def forward(
        self, batch: PackedBatch, temperature: float, *, whole: bool = False, only_scores: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs_N and entropies_N, both with gradient, of the batch's predicted tokens, in
        float32.

        `whole`: log_NV of the whole vocabulary instead of logprobs_N. `only_scores`: the entropies are not
        looked at, and there is no gradient.
        """
        hidden_NE, batch, sizes = self._hidden(batch)
        logprobs, entropies = self._scores(
            hidden_NE, batch, temperature, whole=whole, only_scores=only_scores
        )
        return self.context.whole(logprobs, sizes), self.context.whole(entropies, sizes)

    def _scores(
        self,
        hidden_NE: Tensor | None,
        batch: PackedBatch,
        temperature: float,
        *,
        whole: bool,
        only_scores: bool,
    ) -> tuple[Tensor, Tensor]:
        if hidden_NE is not None and not whole:
            if only_scores and self.kernels.head and not torch.is_grad_enabled():
                scores_N = scored_by_liger(hidden_NE, self._head(), batch.targets_N, temperature)
                return scores_N, torch.zeros_like(scores_N)
            return token_logprobs(
                hidden_NE, self._head(), batch.targets_N, temperature, wide=self.kernels.products
            )
        if hidden_NE is None:
            logits_NV = self._padded(batch, self.model, "logits")
        else:
            logits_NV = hidden_NE @ self._head().to(hidden_NE.dtype).T
        log_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
        logprobs = log_NV if whole else log_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
        with torch.set_grad_enabled(self.entropy_has_gradient and torch.is_grad_enabled()):
            return logprobs, -(log_NV.exp() * log_NV).sum(dim=-1)

    def _hidden(self, batch: PackedBatch) -> tuple[Tensor | None, PackedBatch, list[int]]:
        """Return hidden_NE of what predicts (None where rows are not packed), the batch with this rank's
        predicted tokens alone, and how many each rank has."""
        if self.why_not_packed:
            return None, batch, []
        row = padded(batch, self.context.num)
        part = self.context.part(row.ids_1S.shape[1])
        with packed_row():
            output = self.model.base_model(
                input_ids=row.ids_1S[:, part],
                position_ids=row.positions_1S[:, part],
                packing=replace(row.packing, by_kernel=self.kernels.attention, context=self.context),
                use_cache=False,
            )
        hidden_PE: Tensor = output.last_hidden_state[0]
        sizes: list[int] = []
        if self.context.num > 1:
            of_rank_N = torch.div(row.predicting_N, len(hidden_PE), rounding_mode="floor")
            sizes = torch.bincount(of_rank_N, minlength=self.context.num).tolist()
            mine_N = of_rank_N == self.context.rank
            predicting_M = row.predicting_N[mine_N] - part.start
            row = replace(row, predicting_N=predicting_M, targets_N=row.targets_N[mine_N])
        return hidden_PE.index_select(0, row.predicting_N).to(self.compute_dtype), row, sizes

    def _head(self) -> Tensor:
        weight = self.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        assert isinstance(weight, Tensor)
        return weight

    def _padded(self, batch: PackedBatch, model: nn.Module, output: str) -> Tensor:
        """Return the rows of `model`'s output that predict, by way of padded rows."""
        packing = batch.packing
        real_BL = torch.zeros_like(packing.spread_BL).flatten().index_fill(0, packing.gather_S, 1)
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


def layers_of(scorer: nn.Module) -> list[nn.Module]:
    """Return the model's layers: the modules that `transformers` never splits."""
    names = set(getattr(scorer.model, "_no_split_modules", None) or ())
    return [module for module in scorer.modules() if type(module).__name__ in names]


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
        self, batch: PackedBatch, temperature: float, *, whole: bool = False, only_scores: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return values_N: of each predicted token, what is to come before it is chosen. Nothing depends on
        `temperature` and `only_scores`."""
        hidden_NE, batch, sizes = self._hidden(batch)
        if hidden_NE is None:
            hidden_NE = self._padded(batch, self.model.base_model, "last_hidden_state")
        values_N = self.context.whole(hidden_NE.float() @ getattr(self.model, VALUE_HEAD).float(), sizes)
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
