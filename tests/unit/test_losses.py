"""Losses against values and gradients worked out in numpy, and identities that need no golden value."""

import itertools

import numpy as np
import pytest
import torch

from rlboost_runtime.trainer.losses import (
    LossConfig,
    MismatchSums,
    group_advantages,
    mismatch,
    overlong_penalty,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# Three sequences of 3, 2 and 1 generated tokens; masked places hold values that would show if they counted.
MASK = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 0]], dtype=float)
LOGP = np.array([[-1.0, -0.5, -2.0], [np.nan, -0.7, -1.2], [-0.3, np.inf, -9.0]])
OLD = np.array([[-1.1, -1.0, -1.5], [5.0, -2.5, -1.2], [-0.4, 0.0, 0.0]])
MU = np.array([[-1.0, -1.9, -1.5], [0.0, -2.4, -1.3], [-0.4, 0.0, 0.0]])
ADV = np.array([1.0, -0.5, 2.0])


def expected(kind: str, config: LossConfig) -> tuple[float, np.ndarray, float]:
    """Value, gradient by LOGP, and weight, token by token from the formulas."""
    value, gradient = 0.0, np.zeros_like(MASK)
    lengths = MASK.sum(axis=1)
    for b, t in itertools.product(range(3), range(3)):
        if not MASK[b, t]:
            continue
        ratio = np.exp(LOGP[b, t] - OLD[b, t])
        plain = ratio * ADV[b]
        bounded = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * ADV[b]
        objective, slope = (plain, plain) if plain <= bounded else (bounded, 0.0)
        if config.dual_clip is not None and ADV[b] < 0 and objective < config.dual_clip * ADV[b]:
            objective, slope = config.dual_clip * ADV[b], 0.0
        if config.importance_cap is not None:
            weight = min(np.exp(OLD[b, t] - MU[b, t]), config.importance_cap)
            objective, slope = weight * objective, weight * slope
        scale = 1.0 / lengths[b] if kind == "grpo" else 1.0
        value -= scale * objective
        gradient[b, t] = -scale * slope
    return value, gradient, 3.0 if kind == "grpo" else 6.0


def tensors() -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float64) for x in (LOGP, OLD, MU, ADV, MASK)]


@pytest.mark.parametrize(
    "config",
    [
        LossConfig("dapo", 0.2, 0.28, 3.0, 2.0),
        LossConfig("dapo", 0.2, 0.28, None, None),
        LossConfig("grpo", 0.2, 0.2, 3.0, None),
        LossConfig("grpo", 0.2, 0.2, None, 2.0),
        LossConfig("dapo", 0.9, 9.0, 1.5, 1.1),
    ],
)
def test_value_gradient_and_weight_agree_with_the_formula(config):
    logp, old, mu, adv, mask = tensors()
    logp.requires_grad_()
    sums = policy_loss(logp, old, mu, adv, mask, config)
    value, gradient, weight = expected(config.kind, config)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(torch.nan_to_num(logp.grad).numpy(), gradient, rtol=1e-12)
    assert (sums.weight, sums.tokens) == (weight, 6)


def test_golden_numbers():
    """Worked out once with a pocket calculator's precision: guards the test's own formula."""
    logp = torch.tensor([[0.1, -0.3], [0.5, 0.0]]).requires_grad_()
    zero = torch.zeros(2, 2)
    adv, mask = torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    # ratios: e^.1 = 1.10517 (inside), e^-.3 = .74082 (A > 0: min keeps it), e^.5 = 1.64872 (A < 0: likewise)
    dapo = policy_loss(logp, zero, zero, adv, mask, LossConfig("dapo"))
    assert dapo.loss.item() == pytest.approx(-(1.10517 + 0.74082 - 1.64872), abs=1e-4)
    grpo = policy_loss(logp, zero, zero, adv, mask, LossConfig("grpo", 0.2, 0.2))
    assert grpo.loss.item() == pytest.approx(-((1.10517 + 0.74082) / 2 - 1.64872), abs=1e-4)
    assert (dapo.weight, grpo.weight) == (3.0, 2.0)


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_micro_batches_in_any_order_give_the_gradient_of_the_whole(kind):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 5, generator=generator)
    old, mu = logits + 0.3 * torch.randn(8, 5, generator=generator), logits + 0.1
    adv = torch.randn(8, generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (8, 1), generator=generator)).float()
    config = LossConfig(kind)

    def gradient(batches: list[list[int]]) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        weight = 0.0
        for rows in batches:
            sums = policy_loss(leaf[rows], old[rows], mu[rows], adv[rows], mask[rows], config)
            sums.loss.backward()
            weight += sums.weight
        return leaf.grad / weight

    whole = gradient([list(range(8))])
    for batches in ([[3], [0, 7], [1, 2, 4, 5, 6]], [[7, 6, 5], [4, 3, 2, 1], [0]], [[i] for i in range(8)]):
        torch.testing.assert_close(gradient(batches), whole, rtol=1e-5, atol=1e-8)


def test_ratio_one_is_reinforce_with_a_baseline():
    logp = torch.tensor([[-0.2, -1.0], [-2.0, -0.1]]).requires_grad_()
    same = logp.detach()
    adv, mask = torch.tensor([0.7, -1.3]), torch.ones(2, 2)
    policy_loss(logp, same, same, adv, mask, LossConfig("dapo")).loss.backward()
    torch.testing.assert_close(logp.grad, -adv.unsqueeze(1).expand(2, 2))


def test_grpo_and_dapo_agree_when_all_lengths_are_one():
    logp, old, mu = (torch.randn(6, 1, generator=torch.Generator().manual_seed(i)) for i in range(3))
    adv, mask = torch.randn(6, generator=torch.Generator().manual_seed(4)), torch.ones(6, 1)
    grpo, dapo = (policy_loss(logp, old, mu, adv, mask, LossConfig(k)) for k in ("grpo", "dapo"))
    assert (grpo.loss.item(), grpo.weight) == (pytest.approx(dapo.loss.item()), dapo.weight)


def test_importance_cap_bounds_the_weight_and_carries_no_gradient():
    logp = torch.tensor([[0.0, 0.0]]).requires_grad_()
    old, mu = torch.zeros(1, 2), torch.tensor([[-5.0, 1.0]])  # weights e^5 and e^-1
    policy_loss(logp, old, mu, torch.tensor([1.0]), torch.ones(1, 2), LossConfig("dapo")).loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-2.0, -np.exp(-1.0)]], dtype=torch.float32))


def test_rows_without_a_token_add_nothing():
    zero = torch.zeros(2, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    sums = policy_loss(zero, zero, zero, torch.ones(2), mask, LossConfig("grpo"))
    assert (sums.weight, sums.tokens) == (1.0, 2)


def test_advantages_use_the_sample_standard_deviation():
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))[0].numpy()
    np.testing.assert_allclose(found, (np.array([1, 0, 0, 0]) - 0.25) / (0.5 + 1e-6), rtol=1e-6)


def test_advantages_of_equal_rewards_are_zero_also_where_the_mean_rounds():
    rewards = torch.tensor([[0.1] * 7, [1 / 3] * 7], dtype=torch.float32)
    assert not group_advantages(rewards).any()


def test_advantages_ignore_shift_and_scale_of_rewards():
    rewards = torch.tensor([[0.2, 0.9, 0.4, 0.1], [0.0, 1.0, 1.0, 0.5]])
    torch.testing.assert_close(
        group_advantages(3 * rewards - 7), group_advantages(rewards), rtol=1e-4, atol=1e-5
    )


def test_quarantined_responses_do_not_count_in_their_group():
    rewards = torch.tensor([[1.0, 0.0, 9.0], [1.0, 5.0, 5.0]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    found = group_advantages(rewards, valid)
    torch.testing.assert_close(found[0, :2], group_advantages(rewards[:1, :2])[0])
    assert found[0, 2] == 0
    assert not found[1].any()


def test_overlong_penalty():
    found = [overlong_penalty(n, 16, 5) for n in (0, 11, 12, 15, 16)]
    assert found == pytest.approx([0, 0, -0.2, -0.8, -1.0])
    assert overlong_penalty(16, 16, 0) == 0


def test_mismatch_metrics():
    old, mu = torch.tensor([[-1.0, -2.0, 7.0]]), torch.tensor([[-1.0, -2.5, 0.0]])
    sums = mismatch(old, mu, torch.tensor([[1.0, 1.0, 0.0]]))
    found = (sums + MismatchSums()).metrics()
    weights = np.exp([0.0, 0.5])
    assert found["mismatch_kl"] == pytest.approx((weights[1] - 0.5 - 1) / 2, rel=1e-6)
    assert found["mismatch_abs_mean"] == pytest.approx(0.25)
    assert found["mismatch_abs_max"] == pytest.approx(0.5)
    assert found["effective_sample_share"] == pytest.approx(weights.sum() ** 2 / (2 * (weights**2).sum()))


def test_truncated_importance_sampling_reduces_bias_on_a_bandit():
    """Arms sampled from mu, gradient wanted under pi: the weighted estimate is nearer to the exact one."""
    pi_logits = torch.tensor([0.5, 0.0, -0.5])
    mu_log = torch.log_softmax(pi_logits + torch.tensor([0.4, -0.3, 0.2]), dim=0)
    adv = torch.tensor([1.0, -0.5, 0.2])
    arms = torch.multinomial(
        mu_log.exp(), 20_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )

    def estimate(cap: float | None) -> torch.Tensor:
        logits = pi_logits.clone().requires_grad_()
        logp = torch.log_softmax(logits, dim=0)[arms].unsqueeze(1)
        sums = policy_loss(
            logp, logp.detach(), mu_log[arms].unsqueeze(1), adv[arms], torch.ones(len(arms), 1),
            LossConfig("dapo", importance_cap=cap),
        )  # fmt: skip
        (sums.loss / sums.weight).backward()
        return logits.grad

    exact_logits = pi_logits.clone().requires_grad_()
    (-(torch.softmax(exact_logits, dim=0) * adv).sum()).backward()
    corrected, plain = estimate(2.0) - exact_logits.grad, estimate(None) - exact_logits.grad
    assert corrected.norm() < 0.3 * plain.norm()
