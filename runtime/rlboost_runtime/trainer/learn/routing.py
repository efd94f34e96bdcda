"""Which experts a mixture's tokens go to: remembered, replayed, and kept in balance.

Replay: a router chooses the experts with the highest scores, so a small change of weights sends some tokens
elsewhere, and their probability ratios jump. Mini-batches after a step's first can use the experts that the
step's policy chose instead (arXiv 2507.18071, section 5.3: routing replay); the scores by which these are
weighted stay those of the present weights, with their gradient.

Balance: the auxiliary loss of Switch Transformers (arXiv 2101.03961, equation 4), the mean over layers of
num_experts * sum over experts of (share of choices that fall on it) * (mean of its probability). It is 1 with
even loads, and num_experts where all go to one expert.

Shape suffixes: S positions of the packed row, Y layers with experts, K experts of a token, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm
from rlboost_runtime.trainer.learn.logprobs import LogprobModel
from rlboost_runtime.trainer.learn.sample import Routes

KNOWN = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "MixtralTopKRouter", "OlmoeTopKRouter")
"""Routers of `transformers` that give logits_SX, scores_SK and experts_SK, scores being a softmax's."""


@dataclass(slots=True)
class RoutedPass:
    """What the routers did in one forward pass, by layer."""

    chosen_SK: dict[int, Tensor] = field(default_factory=dict)
    """The experts with the highest scores."""
    used_SK: dict[int, Tensor] = field(default_factory=dict)
    """The experts that computed the tokens."""
    logits_SX: dict[int, Tensor] = field(default_factory=dict)

    def routes(self) -> Tensor:
        """Return routes_SYK, int16, on the CPU: the experts that computed the tokens."""
        return torch.stack([self.used_SK[layer] for layer in sorted(self.used_SK)], 1).short().cpu()

    def imbalance(self) -> Tensor:
        """Return the auxiliary loss, with gradient."""
        return torch.stack(
            [_imbalance(self.logits_SX[layer], used) for layer, used in self.used_SK.items()]
        ).mean()

    def moved(self) -> int:
        """Return how many choices, of all positions and layers, are not what the present weights prefer."""
        return sum(
            int((used[:, :, None] != self.chosen_SK[layer][:, None, :]).all(-1).sum())
            for layer, used in self.used_SK.items()
            if used is not self.chosen_SK[layer]
        )

    def num(self) -> int:
        """Return the number of choices."""
        return sum(used.numel() for used in self.used_SK.values())


def _imbalance(logits_SX: Tensor, used_SK: Tensor) -> Tensor:
    num = logits_SX.shape[-1]
    shares_X = torch.bincount(used_SK.flatten(), minlength=num) / used_SK.numel()
    return num * (shares_X * torch.softmax(logits_SX.float(), -1).mean(0)).sum()


class Routing:
    """The routers of a model that computes packed rows. Not thread-safe."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self._pass: RoutedPass | None = None
        self._replayed_SYK: Tensor | None = None
        self._num_layers = len(routers)
        self.width = sum(cast(int, router.top_k) for router in routers)
        """Choices of a position, through all layers."""
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._routed, layer))

    @classmethod
    def of(cls, scorer: LogprobModel, algorithm: Algorithm) -> Routing | None:
        """Return the routing of the scorer's model; None: it has no routers that we know. Raises
        `ConfigError` if the job needs them."""
        routers = [module for module in scorer.modules() if type(module).__name__ in KNOWN]
        if routers and scorer.why_not_packed is None:
            return cls(routers)
        wanted = [name for name in ("router_replay", "router_aux_loss_coef") if getattr(algorithm, name)]
        if wanted:
            model = type(scorer.model).__name__
            why = (
                f"{model} is trained on padded rows" if routers else f"{model} has no routers of a known kind"
            )
            raise ConfigError(
                f"algorithm.{wanted[0]}: found {getattr(algorithm, wanted[0])}, but {why}",
                "remove it; docs/models.md lists the models that have it",
            )
        return None

    def table(self, routes: Sequence[Routes]) -> Tensor:
        """Return routes_SYK of a packed row's sequences, one after the other."""
        return torch.from_numpy(np.concatenate(routes)).view(
            -1, self._num_layers, self.width // self._num_layers
        )

    @contextmanager
    def watched(self, routes_SYK: Tensor | None = None) -> Iterator[RoutedPass]:
        """Within it, note what the routers do in one forward pass, and in its backward pass's recomputation;
        with `routes_SYK`, send each token to these experts."""
        self._pass, self._replayed_SYK = RoutedPass(), routes_SYK
        try:
            yield self._pass
        finally:
            self._pass = self._replayed_SYK = None

    def _routed(
        self, layer: int, router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> Any:
        logits_SX, scores_SK, chosen_SK = output
        if self._pass is None:
            return output
        used_SK = chosen_SK
        if self._replayed_SYK is not None:
            used_SK = self._replayed_SYK[:, layer].to(chosen_SK)
            scores_SK = _scores(router, logits_SX, used_SK).to(scores_SK.dtype)
        self._pass.chosen_SK[layer] = chosen_SK
        self._pass.used_SK[layer] = used_SK
        self._pass.logits_SX[layer] = logits_SX
        return logits_SX, scores_SK, used_SK


def _scores(router: nn.Module, logits_SX: Tensor, experts_SK: Tensor) -> Tensor:
    """Return the weights of these experts' answers, as the router computes those of its own choice."""
    scores_SK = torch.softmax(logits_SX.float(), -1).gather(-1, experts_SK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always does
        scores_SK = scores_SK / scores_SK.sum(-1, keepdim=True)
    return scores_SK
