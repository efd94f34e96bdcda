"""The experts of a mixture as grouped matrix products, in the dtype that everything else computes in.

`transformers` hands the products to torch, which does not cast under autocast: float32 weights would be
multiplied in float32, at a fraction of a GPU's speed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

EXPERTS = "rlboost_grouped"
"""Name of the experts' arithmetic under which `transformers` finds ours."""


def use_grouped_experts(model: PreTrainedModel, *, is_on: bool = True) -> None:
    """Let the experts of `model`, if it has any, be grouped products, or one product after the other."""
    if has_experts(model):
        model.set_experts_implementation(EXPERTS if is_on else "eager")


def has_experts(model: PreTrainedModel) -> bool:
    """Return True if a layer of `model` has experts whose arithmetic can be chosen."""
    return any(hasattr(module, "_is_expert_parallel") for module in model.modules())


class _Cast:
    """A module whose floating-point tensors are those of another one in `dtype`."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:  # whatever the module has
        found = getattr(self._module, name)
        return found.to(self._dtype) if isinstance(found, Tensor) and found.is_floating_point() else found


def grouped_experts(module: nn.Module, hidden_NE: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Return what the K experts of each of N tokens answer, weighted and summed."""
    device = hidden_NE.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        cast_module = cast(nn.Module, _Cast(module, dtype))
        found = grouped_mm_experts_forward(cast_module, hidden_NE.to(dtype), experts_NK, weights_NK.to(dtype))
    else:
        found = grouped_mm_experts_forward(module, hidden_NE, experts_NK, weights_NK)
    assert isinstance(found, Tensor)
    return found


ExpertsInterface.register(EXPERTS, grouped_experts)
