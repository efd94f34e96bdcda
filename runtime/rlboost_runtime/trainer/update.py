"""The optimizer's side of a step: micro-batches in, one division and one AdamW step per mini-batch.

Gradients of a mini-batch are accumulated un-normalised and divided once, so neither the split into
micro-batches nor their order changes the result beyond rounding; the same micro-batches in the same order
give the same bits on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlboost_runtime.job import Algorithm
from rlboost_runtime.trainer.losses import LossConfig, MismatchSums, mismatch, policy_loss
from rlboost_runtime.trainer.policy import Forward, Policy

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response with what the trainer needs of it.

    `logprobs`: the engine's, one per token of `token_ids`. `usable` False (quarantined) masks it out.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    advantage: float
    usable: bool = True


@dataclass(slots=True)
class StepSums:
    """What a step's updates add up to; see `metrics`."""

    loss: float = 0.0
    tokens: int = 0
    clipped: int = 0
    entropy: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    empty_minibatches: int = 0
    not_finite_minibatches: int = 0
    mismatch: MismatchSums = field(default_factory=MismatchSums)

    def metrics(self) -> dict[str, float]:
        """Return means per token (entropy in nats) and the mean gradient norm before clipping."""
        n = max(self.tokens, 1)
        return {
            "loss": self.loss / max(len(self.grad_norms), 1),
            "tokens_trained": float(self.tokens),
            "clip_share": self.clipped / n,
            "entropy": self.entropy / n,
            "grad_norm": sum(self.grad_norms) / max(len(self.grad_norms), 1),
            "minibatches_empty": float(self.empty_minibatches),
            "minibatches_not_finite": float(self.not_finite_minibatches),
            **self.mismatch.metrics(),
        }


class Learner:
    """Trains a policy: `begin_step`, then `accumulate` and `apply` per mini-batch."""

    def __init__(self, policy: Policy, algorithm: Algorithm) -> None:
        self.policy = policy
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(), lr=algorithm.learning_rate, betas=BETAS, weight_decay=0.0
        )
        self.sums = StepSums()
        self._algorithm = algorithm
        self._config = loss_config(algorithm)
        self._weight = 0.0
        self._loss = 0.0
        self._updated = False

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`: a linear ramp, then constant."""
        ramp = self._algorithm.learning_rate_warmup_steps
        return self._algorithm.learning_rate * (min(1.0, (step + 1) / ramp) if ramp else 1.0)

    def begin_step(self, step: int) -> None:
        """Forget sums and gradients; the weights are the step's policy until the first `apply`."""
        self.sums = StepSums()
        self.optimizer.zero_grad(set_to_none=True)
        self._weight = self._loss = 0.0
        self._updated = False
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Add the un-normalised gradient of the samples, at most `micro_batch_responses` rows at a time."""
        usable = [sample for sample in samples if sample.usable and sample.token_ids]
        rows = self._algorithm.micro_batch_responses
        for start in range(0, len(usable), rows):
            self._accumulate(usable[start : start + rows])

    def _accumulate(self, samples: Sequence[Sample]) -> None:
        prompts = [sample.prompt_ids for sample in samples]
        result = self.policy.forward(
            prompts, [sample.token_ids for sample in samples], self._algorithm.temperature
        )
        mu = _place(samples, result)
        old = mu if self._updated else result.logprobs.detach()  # see losses.py: which policy is "old"
        advantages = torch.tensor([sample.advantage for sample in samples], device=mu.device)
        sums = policy_loss(result.logprobs, old, mu, advantages, result.mask, self._config)
        sums.loss.backward()  # type: ignore[no-untyped-call]
        self._weight += sums.weight
        self._loss += float(sums.loss.detach())
        self.sums.tokens += sums.tokens
        self.sums.clipped += sums.clipped
        self.sums.entropy += float((result.entropy * result.mask).sum())
        if not self._updated:
            self.sums.mismatch += mismatch(old, mu, result.mask)

    def apply(self) -> None:
        """Divide the gradients once, clip them and step the optimizer.

        A mini-batch without a usable token, or with a gradient that is not finite, is counted and skipped.
        """
        if self._weight == 0:
            self.sums.empty_minibatches += 1
            return
        parameters = [p for p in self.policy.model.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(self._weight)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self._algorithm.grad_clip)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
            self.sums.grad_norms.append(float(norm))
            self.sums.loss += self._loss / self._weight
            self._updated = True
        else:  # one such update would make every weight nan
            self.sums.not_finite_minibatches += 1
        self.optimizer.zero_grad(set_to_none=True)
        self._weight = self._loss = 0.0


def loss_config(algorithm: Algorithm) -> LossConfig:
    """Return the loss that the job asks for, its defaults filled in."""
    high = algorithm.clip_high
    if high is None:
        high = 0.28 if algorithm.loss == "dapo" else 0.2
    return LossConfig(algorithm.loss, algorithm.clip_low, high, algorithm.dual_clip, algorithm.importance_cap)


def _place(samples: Sequence[Sample], result: Forward) -> Tensor:
    """Return the engine's logprobs at the positions where `Policy.forward` predicts the tokens, 0
    elsewhere."""
    like = result.logprobs
    placed = torch.zeros(like.shape, dtype=like.dtype)
    for i, sample in enumerate(samples):
        start = len(sample.prompt_ids) - 1 - result.first
        placed[i, start : start + len(sample.token_ids)] = torch.tensor(sample.logprobs)
    return placed.to(like.device)
