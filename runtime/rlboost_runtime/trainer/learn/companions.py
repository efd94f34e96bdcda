"""The models beside the policy: a reference, and ppo's critic.

The reference of a KL penalty or of dpo is frozen, and asked only for logprobs. Under adapters the base
weights are the reference and take no memory of their own. Otherwise a second model lies in main memory,
sharded like the policy and in the dtype that the policy computes in; it is on the GPU only within `ready`, so
it costs its bytes there for the time of a forward pass, and two copies of them over the bus.

The critic is trained beside the policy and, like it, is sharded over the ranks, moves between main memory and
GPU (`policy.Residency`), and is part of every checkpoint. It is a model of its own, as in OpenRLHF, veRL and
TRL: a value head on the policy's body would change what is published with every value that it learns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.logs import event
from rlboost_runtime.trainer.learn import lora as adapters
from rlboost_runtime.trainer.learn.logprobs import LogprobModel, ValueModel, give_value_head
from rlboost_runtime.trainer.learn.losses import Floats, gae, kl_terms, value_loss
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.ranks import ALONE, Adam, Ranks, clip_gradients
from rlboost_runtime.trainer.learn.sample import Sample

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
        scorer.context = policy.scorer.context
        torch.nn.Module.requires_grad_(other.model, requires_grad=False)
        scorer.compute_in(policy.scorer.compute_dtype, casts=False)
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


class Critic:
    """Predicts, before each token, what of a response's reward is still to come. All ranks make one and train
    it together."""

    def __init__(
        self,
        body: Policy,
        algorithm: Algorithm,
        trainer: Trainer | None = None,
        ranks: Ranks = ALONE,
        *,
        is_sent: bool = False,
    ) -> None:
        """`body`: the model that it begins as, freshly loaded, or from its part of a checkpoint. With `lora`
        it has adapters of its own. `is_sent`: rank 0 sends the others its weights."""
        assert algorithm.critic is not None
        trainer = Trainer() if trainer is None else trainer
        give_value_head(body.model)
        body.scorer = ValueModel(body.model)
        body.set_up(trainer, algorithm, ranks, is_sent=is_sent)
        self.body = body
        self.optimizer = Adam.of(body.model, algorithm, trainer, body.mover)
        if not body.mover.moves:  # else the first `Residency.take` decides
            self.optimizer.use_fused(is_on=body.scorer.kernels.adamw)
        self._algorithm = algorithm
        self._settings = algorithm.critic
        self._ranks = ranks
        self._metrics: dict[str, float] = {}
        self._loss, self._clipped = 0.0, 0
        self._step_losses: list[float] = []
        self._step_norms: list[float] = []
        self._step_clipped = self._step_tokens = 0.0
        event(log, "critic.loaded", model=str(body.source), ranks=ranks.num)

    @property
    def scorer(self) -> LogprobModel:
        """What computes values in the place of logprobs."""
        return self.body.scorer

    def is_warming_up(self, step: int) -> bool:
        """Return True if the critic alone is trained in `step`."""
        return step < self._settings.warmup_steps

    def begin_step(self, step: int) -> None:
        """Reset sums and gradients."""
        self._metrics, self._step_losses, self._step_norms = {}, [], []
        self._step_clipped = self._step_tokens = 0.0
        self.reset()
        for group in self.optimizer.param_groups:
            group["lr"] = self._algorithm.learning_rate_at(step, self._settings.learning_rate)

    def judge(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return a step's samples, which have rewards and values, with advantages and returns; on rank 0."""
        found, self._metrics = judged(samples, self._algorithm)
        return found

    def accumulate(self, values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> None:
        """Add the un-normalised gradient of a forward pass's values."""
        loss, clipped = value_loss(values_BT, old_BT, returns_BT, mask_BT, self._settings.value_clip)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.scorer.context.leads:
            self._loss += float(loss.detach())
            self._clipped += clipped

    def apply(self, tokens: float) -> None:
        """Divide the gradient by the mini-batch's tokens, clip it and take a step if it is finite."""
        loss, clipped = self._ranks.sum([self._loss, self._clipped])
        norm = clip_gradients(self.body.model, tokens / self._ranks.num, self._algorithm.grad_clip)
        if np.isfinite(norm):
            self.optimizer.update()
            self._step_losses.append(loss / tokens)
            self._step_norms.append(norm)
        self._step_clipped += clipped
        self._step_tokens += tokens
        self.reset()

    def reset(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss, self._clipped = 0.0, 0

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics so far."""
        updates = max(1, len(self._step_losses))
        return self._metrics | {
            "value_loss": sum(self._step_losses) / updates,
            "value_clip_share": self._step_clipped / max(1.0, self._step_tokens),
            "critic_grad_norm": sum(self._step_norms) / updates,
        }


_AT_ONCE = 64
"""Responses of about one length whose advantages are computed together."""


def judged(samples: Sequence[Sample], algorithm: Algorithm) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples with whitened advantages and with returns (`losses.py` has the formulas), and
    metrics of the values that they have. Those that are not trained stay as they are."""
    trained = [i for i, each in enumerate(samples) if each.usable and each.num_sampled]
    if not trained:
        return list(samples), {}
    order = sorted(trained, key=lambda i: len(samples[i].token_ids))
    raw: dict[int, tuple[Floats, Floats]] = {}
    for start in range(0, len(order), _AT_ONCE):
        numbers = order[start : start + _AT_ONCE]
        raw |= zip(numbers, _unwhitened([samples[i] for i in numbers], algorithm), strict=True)
    chosen = {i: _chosen(samples[i]) for i in trained}
    advantages_N = np.concatenate([raw[i][0][chosen[i]] for i in trained])
    returns_N = np.concatenate([raw[i][1][chosen[i]] for i in trained])
    values_N = np.concatenate([_values(samples[i])[chosen[i]] for i in trained])
    mean, std = advantages_N.mean(), max(1e-8, advantages_N.var()) ** 0.5
    found = list(samples)
    for i in trained:
        advantages = ((raw[i][0] - mean) / std).astype(np.float32)
        found[i] = replace(samples[i], advantages=advantages, returns=raw[i][1].astype(np.float32))
    spread = returns_N.var()
    return found, {
        "value_mean": float(values_N.mean()),
        "return_mean": float(returns_N.mean()),
        "explained_variance": float(1 - (returns_N - values_N).var() / spread) if spread > 1e-12 else 0.0,
    }


def _unwhitened(samples: Sequence[Sample], algorithm: Algorithm) -> Iterator[tuple[Floats, Floats]]:
    """Yield advantages and returns of each sample's tokens."""
    settings, kl = algorithm.critic, algorithm.kl
    assert settings is not None
    shape = len(samples), max(len(each.token_ids) for each in samples)
    rewards_BT, values_BT, chosen_BT = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_)
    for row, sample in enumerate(samples):
        num = len(sample.token_ids)
        chosen_BT[row, :num], values_BT[row, :num] = _chosen(sample), _values(sample)
        if kl is not None and kl.is_in_reward:
            assert sample.reference_logprobs is not None
            engine, reference = (torch.tensor(x) for x in (sample.logprobs, sample.reference_logprobs))
            terms = kl_terms(engine.double(), reference.double(), kl.estimator)
            rewards_BT[row, :num] = -kl.coef * terms.numpy()
        if sample.rewards is not None:
            rewards_BT[row, :num] += sample.rewards
        else:
            rewards_BT[row, np.flatnonzero(chosen_BT[row])[-1]] += sample.reward
    found = gae(rewards_BT, values_BT, chosen_BT, settings.gamma, settings.gae_lambda)
    for row, sample in enumerate(samples):
        num = len(sample.token_ids)
        yield found[0][row, :num], found[1][row, :num]


def _chosen(sample: Sample) -> NDArray[np.bool_]:
    return np.ones(len(sample.token_ids), np.bool_) if sample.sampled is None else sample.sampled


def _values(sample: Sample) -> Floats:
    assert sample.values is not None, "score_values comes first"
    return sample.values.astype(np.float64)
