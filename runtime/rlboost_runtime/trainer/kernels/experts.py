"""The experts of a mixture as grouped matrix products."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

GROUPED, ONE_BY_ONE = "grouped_mm", "eager"
"""Names of the experts' arithmetic in `transformers`."""
grouped_experts = grouped_mm_experts_forward
"""(module, hidden_NE, experts_NK, weights_NK): what the K experts of each of N tokens answer, weighted and
summed."""


def use_grouped_experts(model: PreTrainedModel, *, is_on: bool = True) -> None:
    """Let the experts of `model`, if it has any, be grouped products, or one product after the other."""
    if has_experts(model):
        model.set_experts_implementation(GROUPED if is_on else ONE_BY_ONE)


def has_experts(model: nn.Module) -> bool:
    """Return True if a layer of `model` has experts whose arithmetic can be chosen."""
    return any(hasattr(module, "_is_expert_parallel") for module in model.modules())
