"""Weights that are cast for the forward pass and stay float32 in the model: mixed precision on one rank.

Each layer's weights are cast when its forward pass begins and forgotten when it ends, and again where a
checkpointed layer is computed anew, as FSDP does on several ranks (`MixedPrecisionPolicy(param_dtype)`). So
one rank and several compute the same function, and the residual stream has the dtype that it has in engines.
Autocast would leave the stream and the norms in float32: slower, larger, and farther away from the engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class _CastWeights:
    """Hooks around the forward pass of the module that a group of weights belongs to."""

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._places = [
            (module, name)
            for module in modules
            for name, weight in module._parameters.items()
            if weight is not None
        ]
        self._dtype = dtype

    def show(self, *_: Any) -> None:  # a hook's arguments
        """Let each module's attribute be the cast weight: an instance's own attributes come before its
        parameters. Gradients reach the weight through the cast."""
        cast: dict[int, Tensor] = {}  # a tied weight is cast once
        for module, name in self._places:
            weight = module._parameters[name]
            assert weight is not None
            if id(weight) not in cast:
                cast[id(weight)] = weight.to(self._dtype)
            module.__dict__[name] = cast[id(weight)]

    def hide(self, *_: Any) -> None:  # a hook's arguments
        """Forget the cast weights, but for what the backward pass needs."""
        for module, name in self._places:
            module.__dict__.pop(name, None)


def cast_weights(whole: nn.Module, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Let the forward passes of `whole` and of its `layers` compute with their weights in `dtype`.

    Inputs are not cast. Call this once, when the model has all its modules.
    """
    taken: set[nn.Module] = set()
    for unit in (*layers, whole):
        modules = [module for module in unit.modules() if module not in taken]
        taken.update(modules)
        weights = _CastWeights(modules, dtype)
        unit.register_forward_pre_hook(weights.show)
        unit.register_forward_hook(weights.hide, always_call=True)
