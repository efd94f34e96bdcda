"""Advantages and policy losses, as sums that can be accumulated and divided once.

A step's responses arrive in any order and in micro-batches, so nothing here divides by a count that is only
known at the end (the trap of streaming with a token mean): `policy_loss` returns an **un-normalised sum** and
the additive `Totals` from which `divisor` computes, once the mini-batch is complete, what the summed gradient
has to be divided by. So any split of a mini-batch over micro-batches and ranks, in any order, gives the
gradient of the whole.

Losses (the objective J is maximised, the loss is -J; r is the probability ratio of the current to the old
policy, A the advantage, T_i a response's length, N the mini-batch's tokens, R its responses):

| kind | advantage | term of a token | divided by | source |
|---|---|---|---|---|
| grpo | group mean, std | min(r A, clip(r) A) / T_i | R | arXiv 2402.03300 |
| dapo | group mean, std | min(r A, clip(r) A), upper clip 1.28 | N | arXiv 2503.14476 |
| dr_grpo | group mean | min(r A, clip(r) A) | R x max_response_tokens | arXiv 2503.20783 |
| gspo | group mean, std | min(s A, clip(s) A) / T_i, s_i = exp(mean_t log r) | R | arXiv 2507.18071 |
| cispo | group mean, std | sg(clip(r)) A log pi | N | arXiv 2506.13585 |
| rloo | mean of the others | min(r A, clip(r) A) | R | arXiv 2402.14740: the response is one action |
| reinforce_pp | group mean | min(r A, clip(r) A) | N x std of the mini-batch | arXiv 2501.03262 |
| ppo | of a critic, see below | min(r A, clip(r) A) | N | arXiv 1707.06347, 1506.02438 |
| rejection, sft | 1 | log pi | N | arXiv 2304.06767 |
| dpo | 1 for the best, -1 for the worst | see below | pairs | arXiv 2305.18290 |

- dpo: the objective of a pair is log sigmoid(beta x sum over both responses of A log(pi / pi_ref)); the rows
  of a pair follow one another.

- ppo: r_t, a token's reward, is -coef x KL_t with `kl` in the reward, and the last token has the response's
  reward too. With the critic's values V from before the step's first update, and 0 after the last token,
  delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, and the return G_t = A_t + V_t.
  Then A is whitened over all tokens of the step: minus their mean, divided by their std. The critic's loss is
  the mean over tokens of max((v - G)^2, (clip(v) - G)^2) / 2, where clip(v) is v within V +- `value_clip`.
  All of it is as in OpenRLHF; tokens that an environment wrote are passed over.
- rloo: the paper has no ratio; ours is per token and clipped, and 1 where the data is on-policy.
- reinforce_pp is the paper's variant with a group baseline. Its advantages are centred per group, so that
  their mean over the mini-batch is 0; the std is that of responses (some codes whiten tokens instead). As
  every objective here is homogeneous in A, dividing by the std at the end equals normalising A beforehand.
- Dual clip, arXiv 1912.09729: with A < 0 the objective is at least `dual_clip` x A. Not with gspo and cispo.
- Soft overlong penalty, arXiv 2503.14476: `overlong_penalty`.

Trainer against engine: `mu` is what the engine reported for a token when it sampled it, from whichever
instance produced that segment; `old` the step's policy as the trainer computes it; w = exp(old - mu). The
term of a token is multiplied with a constant (arXiv 2505.24034):

- token: min(w, cap), truncated importance sampling;
- icepop: w where floor <= w <= cap, else 0 (arXiv 2510.18855);
- sequence_mask: W_i = exp(sum_t log w) where W_i <= cap, else 0, for the whole response.

KL and entropy: - coef x KL to a reference and + coef x entropy are added to each token's term, after the
correction and before the division, as in TRL and verl. Not with reinforce_pp, whose division is by the
advantages' std. In the reward, KL is subtracted before the advantages (`rollout/groups.py`).

Which policy is "old"? Before the first optimizer step of a step the trainer's own forward pass *is* old, at
no cost. After it there are two ways, and `learner.py` chooses: old recomputed beforehand, or old := mu
("bypass"). With bypass the ratio is that of the current policy to what was really sampled and is clipped as a
whole; the correction then weighs nothing (that would count the mismatch twice) and only drops, by
exp(current - mu).

Shape suffixes: G groups, R responses per group, B responses of a micro-batch, T token positions. A position t
of row b is a generated token where mask_BT is 1; everything else there is padding or prompt and contributes
nothing, whatever it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlboost_runtime.job import Loss

LossKind = Loss
ImportanceKind = Literal["token", "icepop", "sequence_mask"]
KlEstimator = Literal["k1", "k2", "k3"]
Floats = NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, so that a broken logprob gives a large number, not inf."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """Which loss; clips are the bounds of the ratio minus 1, caps and floors those of the ratio itself.

    `importance_cap` None turns the correction off; `dual_clip` None the dual clip. `max_response_tokens` is
    dr_grpo's constant.
    """

    kind: LossKind = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    importance_cap: float | None = 2.0
    importance: ImportanceKind = "token"
    importance_floor: float = 0.5
    max_response_tokens: int = 1
    kl_coef: float = 0.0
    """Of the KL to the reference, per token; 0: no such term."""
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    beta: float = 0.1
    """dpo's."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What a mini-batch's divisor is made of; adds up over micro-batches and ranks."""

    tokens: float = 0.0
    responses: float = 0.0
    """Responses with at least one generated token."""
    advantage_squares: float = 0.0
    """Sum of squared advantages of these responses."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.tokens + other.tokens,
            self.responses + other.responses,
            self.advantage_squares + other.advantage_squares,
        )


@dataclass(frozen=True, slots=True)
class LossSums:
    """What one micro-batch adds to its mini-batch. `loss` carries the gradient and is not yet divided."""

    loss: Tensor
    """Scalar: the sum of all terms."""
    totals: Totals
    clipped: int
    """Tokens whose ratio was clipped: no gradient of theirs was left (cispo: their weight was bounded)."""
    corrected: int
    """Tokens whose importance weight was capped or that were dropped by it."""
    ordered: int = 0
    """dpo: pairs whose best response has the higher implicit reward, beta log(pi / pi_ref)."""
    margin: float = 0.0
    """dpo: sum over pairs by how much it is higher."""


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums that compare engine (mu) and trainer (old) token by token; see `metrics`."""

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

    def metrics(self, staleness: int = 0) -> dict[str, float]:
        """Return what the comparison says of tokens whose old is the trainer's own, with their number.

        `staleness`: updates between the weights that sampled them and old, the same for all tokens of a step.
        Without any, engine and trainer differ in their arithmetic alone: KL(mu || old) in nats per token (k3
        estimate), mean and largest |old - mu|. With some, the policy has moved, too, and the same estimate is
        `lag_kl`. The other one's metrics are left out. `effective_sample_share` is (sum w)^2 / (N sum w^2) of
        either.
        """
        n = max(self.tokens, 1)
        ess = self.weight**2 / (n * self.weight_squared) if self.weight_squared > 0 else 1.0
        found = {
            "mismatch_tokens": 0.0 if staleness else float(self.tokens),
            "lag_tokens": float(self.tokens) if staleness else 0.0,
            "effective_sample_share": ess,
        }
        if staleness:
            return found | {"lag_kl": self.k3 / n}
        return found | {
            "mismatch_kl": self.k3 / n,
            "mismatch_abs_mean": self.absolute / n,
            "mismatch_abs_max": self.largest,
        }


# --- advantages -------------------------------------------------------------------------------------------


def group_advantages(rewards_GR: Tensor, valid_GR: Tensor | None = None, kind: LossKind = "grpo") -> Tensor:
    """Return advantages_GR of `kind` (see the module's table); a std is the sample's (n - 1) + 1e-6.

    A group of equal rewards gets zeros. Where `valid_GR` is False (quarantined), the response neither counts
    in its group's mean and std nor gets an advantage; a group with fewer than two valid responses gets zeros.
    For reinforce_pp the division by the mini-batch's std is left to `divisor`; ppo's are `gae`.
    """
    rewards = rewards_GR.to(torch.float64)
    valid = torch.ones_like(rewards) if valid_GR is None else valid_GR.to(torch.float64)
    count_G1 = valid.sum(dim=1, keepdim=True)
    mean_G1 = (rewards * valid).sum(dim=1, keepdim=True) / count_G1.clamp(min=1)
    centred_GR = (rewards - mean_G1) * valid
    others_G1 = (count_G1 - 1).clamp(min=1)
    std_G1 = (centred_GR.square().sum(dim=1, keepdim=True) / others_G1).sqrt()
    match kind:
        case "grpo" | "dapo" | "gspo" | "cispo":
            advantages_GR = centred_GR / (std_G1 + STD_EPSILON)
        case "dr_grpo" | "reinforce_pp" | "ppo" | "dpo" | "rejection" | "sft":
            advantages_GR = centred_GR
        case "rloo":  # reward - mean of the others = (reward - mean) n / (n - 1)
            advantages_GR = centred_GR * count_G1 / others_G1
        case _:
            assert_never(kind)
    rounding_G1 = 1e-12 * (rewards * valid).abs().amax(dim=1, keepdim=True)
    flat_G1 = (std_G1 <= rounding_G1.clamp(min=1e-9)) | (count_G1 < 2)  # rounding is no advantage
    return torch.where(flat_G1, 0.0, advantages_GR).to(torch.float32)


def gae(
    rewards_BT: Floats, values_BT: Floats, chosen_BT: NDArray[np.bool_], gamma: float, gae_lambda: float
) -> tuple[Floats, Floats]:
    """Return advantages_BT and returns_BT (arXiv 1506.02438), 0 where not chosen: such tokens are passed
    over. Each row ends with its last chosen token."""
    advantages_BT, rows = np.zeros_like(values_BT), len(values_BT)
    after_B, next_value_B = np.zeros(rows), np.zeros(rows)
    for t in reversed(range(values_BT.shape[1])):
        chosen_B, values_B = chosen_BT[:, t], values_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_B
        after_B = np.where(chosen_B, delta_B + gamma * gae_lambda * after_B, after_B)
        next_value_B = np.where(chosen_B, values_B, next_value_B)
        advantages_BT[:, t] = np.where(chosen_B, after_B, 0.0)
    return advantages_BT, advantages_BT + np.where(chosen_BT, values_BT, 0.0)


def value_loss(
    values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, clip: float | None
) -> tuple[Tensor, int]:
    """Return a critic's un-normalised loss, with gradient by `values_BT`; how many tokens were clipped."""
    chosen_BT = mask_BT > 0
    squares_BT = (values_BT - returns_BT).square()
    clipped_BT = torch.zeros_like(chosen_BT)
    if clip is not None:
        moved_BT = values_BT - old_BT
        others_BT = (old_BT + moved_BT.clamp(-clip, clip) - returns_BT).square()
        clipped_BT = (moved_BT.abs() > clip) & (others_BT > squares_BT) & chosen_BT
        squares_BT = torch.maximum(squares_BT, others_BT)
    return _only(chosen_BT, squares_BT).sum() / 2, int(clipped_BT.sum())


def overlong_penalty(num_tokens: int, max_tokens: int, penalty_tokens: int) -> float:
    """Return DAPO's soft overlong penalty, in [-1, 0]: 0 up to max - c tokens, then falling linearly to -1 at
    max.

    `penalty_tokens` is c; 0 turns it off.
    """
    if penalty_tokens == 0:
        return 0.0
    free = max_tokens - penalty_tokens
    return max(-1.0, min(0.0, (free - num_tokens) / penalty_tokens))


# --- losses -----------------------------------------------------------------------------------------------


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    mu_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    config: LossConfig,
    *,
    bypass: bool = False,
    reference_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> LossSums:
    """Return the un-normalised policy loss of a micro-batch.

    `logprobs_BT` and `entropy_BT` carry the gradient; `old`, `mu`, `reference`, advantages and mask are
    constants. `advantages` are [B], for ppo and for turns [B, T]. `bypass` means that old is mu. With
    `kl_coef` or `entropy_coef`, the reference's logprobs or the entropies must be given. Rows without a
    generated token (a response quarantined before its first) add nothing, also not to the totals.
    """
    chosen_BT = mask_BT > 0
    current_BT = _only(chosen_BT, logprobs_BT)
    if config.kind == "dpo":
        assert reference_BT is not None
        return _preference_loss(
            current_BT - _only(chosen_BT, reference_BT), advantages, chosen_BT, config.beta
        )
    mu_BT = _only(chosen_BT, mu_logprobs_BT)
    old_BT = mu_BT if bypass else _only(chosen_BT, old_logprobs_BT.detach())
    advantages = advantages.to(logprobs_BT.dtype).view(len(advantages), -1)
    tokens_B = chosen_BT.sum(dim=1)
    terms_BT, clipped_BT = _terms(current_BT, old_BT, advantages, tokens_B, config)
    weights_BT, corrected_BT = importance_weights(
        current_BT.detach() if bypass else old_BT, mu_BT, chosen_BT, config
    )
    if bypass:
        weights_BT = (weights_BT > 0).to(weights_BT.dtype)
        corrected_BT = weights_BT == 0
    terms_BT = terms_BT * weights_BT  # the engine's mismatch does not weigh what follows, as in TRL
    if config.kl_coef:
        assert reference_BT is not None
        reference_BT = _only(chosen_BT, reference_BT)
        terms_BT = terms_BT - config.kl_coef * kl_terms(current_BT, reference_BT, config.kl_estimator)
    if config.entropy_coef:
        assert entropy_BT is not None
        terms_BT = terms_BT + config.entropy_coef * _only(chosen_BT, entropy_BT)
    terms_BT = _only(chosen_BT, terms_BT)
    if config.kind in ("grpo", "gspo"):
        terms_BT = terms_BT / tokens_B.clamp(min=1).unsqueeze(1)
    squares_B = torch.where(tokens_B > 0, advantages[:, 0].detach().double().square(), 0.0)
    counts = torch.stack(
        [
            tokens_B.sum(),
            (tokens_B > 0).sum(),
            (clipped_BT & chosen_BT).sum(),
            (corrected_BT & chosen_BT).sum(),
        ]
    ).tolist()  # one wait for the device
    totals = Totals(float(counts[0]), float(counts[1]), float(squares_B.sum()))
    return LossSums(-terms_BT.sum(), totals, counts[2], counts[3])


def _preference_loss(ahead_BT: Tensor, signs_B: Tensor, chosen_BT: Tensor, beta: float) -> LossSums:
    """Return dpo's loss; `ahead_BT`: log(pi / pi_ref), rows 2k and 2k + 1 are a pair."""
    tokens_B = chosen_BT.sum(dim=1)
    is_pair_P = (tokens_B > 0).view(-1, 2).all(dim=1)
    margins_P = beta * (signs_B.to(ahead_BT.dtype) * ahead_BT.sum(dim=1)).view(-1, 2).sum(dim=1)
    losses_P = torch.where(is_pair_P, -torch.nn.functional.logsigmoid(margins_P), 0.0)
    margins_P = margins_P.detach()
    num_pairs, tokens, ordered, margin = torch.stack(
        [is_pair_P.sum(), tokens_B.sum(), ((margins_P > 0) & is_pair_P).sum(),
         torch.where(is_pair_P, margins_P, 0.0).sum()]
    ).tolist()  # fmt: skip
    totals = Totals(tokens, 2 * num_pairs, 2 * num_pairs)
    return LossSums(losses_P.sum(), totals, 0, 0, int(ordered), margin)


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Return each token's estimate of KL(policy || reference) in nats, with gradient by `logprobs`
    (http://joschu.net/blog/kl-approx.html)."""
    ahead = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return -ahead
        case "k2":
            return ahead.square() / 2
        case "k3":
            return torch.exp(ahead) - ahead - 1
        case _:
            assert_never(estimator)


def divisor(totals: Totals, config: LossConfig) -> float:
    """Return what the summed gradient of a mini-batch is divided by; 0 if there was nothing to train on."""
    if totals.responses == 0:
        return 0.0
    match config.kind:
        case "dapo" | "cispo" | "ppo" | "rejection" | "sft":
            return totals.tokens
        case "dpo":
            return totals.responses / 2
        case "grpo" | "gspo" | "rloo":
            return totals.responses
        case "dr_grpo":
            return totals.responses * config.max_response_tokens
        case "reinforce_pp":
            variance = totals.advantage_squares / max(totals.responses - 1, 1)
            return totals.tokens * (float(variance**0.5) + STD_EPSILON)
        case _:
            assert_never(config.kind)


def importance_weights(
    old_BT: Tensor, mu_BT: Tensor, chosen_BT: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Return the weights of the tokens against the engine, and where they differ from exp(old - mu).

    Constants; 0 where a token is dropped. Places that are not chosen must be 0 in `old_BT` and `mu_BT`.
    """
    log_w_BT = old_BT - mu_BT
    if config.importance_cap is None:
        return torch.ones_like(log_w_BT), torch.zeros_like(chosen_BT)
    if config.importance == "sequence_mask":
        log_w_BT = log_w_BT.sum(dim=1, keepdim=True).expand_as(log_w_BT)
    weight_BT = torch.exp(log_w_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    corrected_BT = weight_BT > config.importance_cap
    match config.importance:
        case "token":
            return weight_BT.clamp(max=config.importance_cap), corrected_BT
        case "icepop":
            corrected_BT = corrected_BT | (weight_BT < config.importance_floor)
        case "sequence_mask":
            pass
        case _:
            assert_never(config.importance)
    return torch.where(corrected_BT, 0.0, weight_BT), corrected_BT


def mismatch(old_logprobs_BT: Tensor, mu_logprobs_BT: Tensor, mask_BT: Tensor) -> MismatchSums:
    """Return the sums of a micro-batch that compare engine and trainer; masked tokens do not count."""
    chosen = mask_BT > 0
    difference = (old_logprobs_BT.detach() - mu_logprobs_BT)[chosen].double()
    difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if difference.numel() == 0:
        return MismatchSums()
    weight = difference.exp()
    sums = torch.stack(
        [(weight - difference - 1).sum(), difference.abs().sum(), difference.abs().max(), weight.sum(),
         weight.square().sum()]
    ).tolist()  # fmt: skip
    return MismatchSums(difference.numel(), *sums)


def _terms(
    current_BT: Tensor, old_BT: Tensor, advantages: Tensor, tokens_B: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's objective, without correction and normalisation, and where it was clipped."""
    if config.kind in ("rejection", "sft"):
        return advantages * current_BT, torch.zeros_like(current_BT, dtype=torch.bool)
    log_ratio_BT = (current_BT - old_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if config.kind == "gspo":
        mean_B1 = (current_BT - old_BT).sum(dim=1, keepdim=True) / tokens_B.clamp(min=1).unsqueeze(1)
        log_ratio_BT = mean_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expand_as(current_BT)
    ratio_BT = torch.exp(log_ratio_BT)
    bounded_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.kind == "cispo":
        return bounded_BT.detach() * advantages * current_BT, bounded_BT != ratio_BT
    plain_BT = ratio_BT * advantages
    clipped_BT = bounded_BT * advantages
    objective_BT = torch.minimum(plain_BT, clipped_BT)
    is_clipped_BT = clipped_BT < plain_BT
    if config.dual_clip is not None and config.kind != "gspo":
        floor = config.dual_clip * advantages
        is_clipped_BT = is_clipped_BT | ((advantages < 0) & (objective_BT < floor))
        objective_BT = torch.where(advantages < 0, torch.maximum(objective_BT, floor), objective_BT)
    return objective_BT, is_clipped_BT


def _only(chosen_BT: Tensor, values_BT: Tensor) -> Tensor:
    """0 where not chosen: a product would leave the nan of a padded position a nan."""
    return torch.where(chosen_BT, values_BT, 0.0)
