"""Advantages and policy losses, as sums that can be accumulated and divided once.

A step's responses arrive in any order and in micro-batches, so nothing here divides by a count that is only
known at the end (peers.md calls that "the trap in streaming + token-mean"): `policy_loss` returns an
**un-normalised sum** and the weight that the sum of all micro-batches has to be divided by, once, before
the optimizer step. So any split of a mini-batch, in any order, gives the gradient of the whole.

Losses (the objective J is maximised, the loss is -J; m is the mask of generated tokens):

- grpo, arXiv 2402.03300: mean over sequences of the mean over their tokens, clip 1 -/+ 0.2, no KL term.
- dapo, arXiv 2503.14476: mean over all tokens of the mini-batch, upper clip 1.28, no KL term; its soft
  overlong penalty is `overlong_penalty`.
- dual clip, arXiv 1912.09729: tokens with a negative advantage have their objective bounded by `dual_clip *
  A`.
- token-level truncated importance sampling against the engine, arXiv 2505.24034 and "TIS" in peers.md E3:
  each token is weighted with sg(min(exp(old - mu), cap)).

Which policy is "old"? `mu` is what the engine reported for the token when it sampled it, from whichever
instance produced that segment. `old` is the step's policy as the trainer computes it. Before the first
optimizer step of a step the trainer's own forward pass *is* old, at no cost, and the TIS weight carries the
mismatch between engine and trainer. After it (more than one mini-batch per step), recomputing old would take
a second copy of the weights, so there old := mu ("bypass", as in verl and prime-rl): the ratio is then that
of the current policy to what was really sampled, clipped as a whole, and the TIS weight is 1. `update.py`
chooses.

Shape suffixes: G groups, R responses per group, B responses of a micro-batch, T token positions. A position t
of row b is a generated token where mask_BT is 1; everything else there is padding or prompt and contributes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, so that a broken logprob gives a large number, not inf."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which loss; bounds are those of the ratio minus 1, caps those of the ratio itself; None: off."""

    kind: Literal["grpo", "dapo"] = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    importance_cap: float | None = 2.0


@dataclass(frozen=True, slots=True)
class LossSums:
    """What one micro-batch adds to its mini-batch. `loss` carries the gradient and is not yet divided."""

    loss: Tensor
    """Scalar: sum over tokens (dapo) or over per-sequence means (grpo)."""
    weight: float
    """What the sum of `loss` over the mini-batch is divided by: tokens (dapo) or sequences (grpo)."""
    tokens: int
    clipped: int
    """Tokens whose gradient the ratio clip took away."""


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums that compare engine (mu) and trainer (old) token by token; see `Mismatch`."""

    tokens: int = 0
    k3: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            tokens=self.tokens + other.tokens,
            k3=self.k3 + other.k3,
            absolute=self.absolute + other.absolute,
            largest=max(self.largest, other.largest),
            weight=self.weight + other.weight,
            weight_squared=self.weight_squared + other.weight_squared,
        )

    def metrics(self) -> dict[str, float]:
        """Return KL(mu || old) in nats per token (k3 estimate), mean and largest |old - mu|, and the
        effective sample share (sum w)^2 / (N sum w^2), all of the tokens seen before the step's first
        optimizer step."""
        n = max(self.tokens, 1)
        ess = self.weight**2 / (n * self.weight_squared) if self.weight_squared > 0 else 1.0
        return {
            "mismatch_kl": self.k3 / n,
            "mismatch_abs_mean": self.absolute / n,
            "mismatch_abs_max": self.largest,
            "effective_sample_share": ess,
        }


def group_advantages(rewards_GR: Tensor, valid_GR: Tensor | None = None) -> Tensor:
    """Return advantages_GR = (reward - group mean) / (group sample std (n - 1) + 1e-6).

    A group of equal rewards gets zeros. Where `valid_GR` is False (quarantined), the response neither counts
    in its group's mean and std nor gets an advantage; a group with fewer than two valid responses gets zeros.
    """
    rewards = rewards_GR.to(torch.float64)
    valid = torch.ones_like(rewards) if valid_GR is None else valid_GR.to(torch.float64)
    count_G1 = valid.sum(dim=1, keepdim=True)
    mean_G1 = (rewards * valid).sum(dim=1, keepdim=True) / count_G1.clamp(min=1)
    centred_GR = (rewards - mean_G1) * valid
    std_G1 = (centred_GR.square().sum(dim=1, keepdim=True) / (count_G1 - 1).clamp(min=1)).sqrt()
    flat_G1 = (std_G1 <= 1e-9) | (count_G1 < 2)  # rounding of the mean must not become an advantage
    return torch.where(flat_G1, 0.0, centred_GR / (std_G1 + STD_EPSILON)).to(torch.float32)


def overlong_penalty(num_tokens: int, max_tokens: int, penalty_tokens: int) -> float:
    """Return DAPO's soft overlong penalty, in [-1, 0]: 0 up to max - c tokens, then falling linearly to -1 at
    max.

    `penalty_tokens` is c; 0 turns it off.
    """
    if penalty_tokens == 0:
        return 0.0
    free = max_tokens - penalty_tokens
    return max(-1.0, min(0.0, (free - num_tokens) / penalty_tokens))


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mu_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    config: LossConfig,
) -> LossSums:
    """Return the un-normalised policy loss of a micro-batch.

    `logprobs_BT` carry the gradient; `old`, `mu`, advantages and mask are constants. Rows without a generated
    token (a response quarantined before its first) add nothing, also not to the weight.
    """
    mask = mask_BT.to(logprobs_BT.dtype)
    advantages_B1 = advantages_B.to(logprobs_BT.dtype).unsqueeze(1)
    old = old_logprobs_BT.detach()
    ratio = torch.exp((logprobs_BT - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    plain = ratio * advantages_B1
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_B1
    objective = torch.minimum(plain, bounded)
    if config.dual_clip is not None:
        objective = torch.where(
            advantages_B1 < 0, torch.maximum(objective, config.dual_clip * advantages_B1), objective
        )
    if config.importance_cap is not None:
        weight = torch.exp((old - mu_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        objective = objective * weight.clamp(max=config.importance_cap).detach()
    objective = torch.where(mask > 0, objective, 0.0)  # not a product: 0 * nan of a padded position is nan
    tokens_B = mask.sum(dim=1)
    tokens = int(tokens_B.sum().item())
    clipped = int(((bounded < plain) & (mask > 0)).sum().item())
    if config.kind == "dapo":
        return LossSums(-objective.sum(), float(tokens), tokens, clipped)
    per_sequence_B = objective.sum(dim=1) / tokens_B.clamp(min=1)
    return LossSums(-per_sequence_B.sum(), float((tokens_B > 0).sum().item()), tokens, clipped)


def mismatch(old_logprobs_BT: Tensor, mu_logprobs_BT: Tensor, mask_BT: Tensor) -> MismatchSums:
    """Return the sums of a micro-batch that compare engine and trainer; masked tokens do not count."""
    chosen = mask_BT > 0
    difference = (old_logprobs_BT.detach() - mu_logprobs_BT)[chosen].double()
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if difference.numel() == 0:
        return MismatchSums()
    weight = difference.exp()
    return MismatchSums(
        tokens=difference.numel(),
        k3=float((weight - difference - 1).sum()),
        absolute=float(difference.abs().sum()),
        largest=float(difference.abs().max()),
        weight=float(weight.sum()),
        weight_squared=float(weight.square().sum()),
    )
