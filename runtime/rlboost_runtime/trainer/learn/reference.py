"""The reference policy of a KL penalty or of dpo: frozen, asked only for logprobs.

Under adapters the base weights are the reference and take no memory of their own. Otherwise a second model
lies in main memory, sharded like the policy and in the dtype that the policy computes in; it is on the GPU
only within `ready`, so it costs its bytes there for the time of a forward pass, and two copies of them over
the bus.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlboost_runtime.logs import event
from rlboost_runtime.trainer.learn import lora as adapters
from rlboost_runtime.trainer.learn.logprobs import LogprobModel
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.ranks import ALONE, Ranks

log = logging.getLogger(__name__)


class Reference:
    """What the policy is held near. All ranks make one and use it together."""

    def __init__(
        self, policy: Policy, other: Policy | None, ranks: Ranks = ALONE, *, is_sent: bool = False
    ) -> None:
        """`policy` is set up. `other`: the reference's model, freshly loaded; None: the weights under the
        policy's adapters. `is_sent`: rank 0 sends the others its weights."""
        self._policy = policy
        self._scorer: LogprobModel | None = None
        if other is None:
            return
        self._scorer = scorer = other.scorer
        torch.nn.Module.requires_grad_(other.model, requires_grad=False)
        scorer.compute_dtype, scorer.autocast = policy.scorer.compute_dtype, policy.scorer.autocast
        torch.nn.Module.to(other.model, scorer.compute_dtype)
        other.spread(ranks, is_sent=is_sent)
        num_bytes = sum(each.numel() * each.element_size() for each in other.model.parameters())
        event(log, "reference.loaded", model=str(other.source), main_memory_bytes=num_bytes, ranks=ranks.num)

    @contextmanager
    def ready(self) -> Iterator[LogprobModel]:
        """Yield what computes the reference's logprobs; the policy must be where it is trained."""
        if self._scorer is None:
            with adapters.disabled(self._policy.model):
                yield self._policy.scorer
            return
        mover = self._policy.mover
        self._scorer.kernels = self._policy.scorer.kernels
        if mover.moves:
            self._scorer._apply(mover.onto)  # type: ignore[no-untyped-call]
        try:
            yield self._scorer
        finally:
            if mover.moves:
                self._scorer._apply(mover.off)  # type: ignore[no-untyped-call]
