"""Losses against values and gradients worked out in numpy, and identities that need no golden value."""

import itertools

import numpy as np
import pytest
import torch

from rlboost_runtime.trainer.learn.losses import (
    LossConfig,
    MismatchSums,
    Totals,
    divisor,
    group_advantages,
    mismatch,
    overlong_penalty,
    policy_loss,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp"]

# Three sequences of 3, 2 and 1 generated tokens; masked places hold values that would show if they counted.
MASK = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 0]], dtype=float)
LOGP = np.array([[-1.0, -0.5, -2.0], [np.nan, -0.7, -1.2], [-0.3, np.inf, -9.0]])
OLD = np.array([[-1.1, -1.0, -1.5], [5.0, -2.5, -1.2], [-0.4, 0.0, 0.0]])
MU = np.array([[-1.0, -1.9, -1.5], [0.0, -2.4, -1.3], [-0.4, 0.0, 0.0]])
ADV = np.array([1.0, -0.5, 2.0])


def weight_of(b: int, t: int, config: LossConfig, old: np.ndarray) -> float:
    """The correction's weight of a token."""
    if config.importance_cap is None:
        return 1.0
    w = np.exp(old[b, t] - MU[b, t])
    if config.importance == "token":
        return min(w, config.importance_cap)
    if config.importance == "icepop":
        return w if config.importance_floor <= w <= config.importance_cap else 0.0
    whole = np.exp(sum(old[b, u] - MU[b, u] for u in range(3) if MASK[b, u]))
    return whole if whole <= config.importance_cap else 0.0


def expected(kind: str, config: LossConfig, bypass: bool = False) -> tuple[float, np.ndarray, float]:
    """Value, gradient by LOGP, and divisor, token by token from the formulas."""
    value, gradient = 0.0, np.zeros_like(MASK)
    lengths = MASK.sum(axis=1)
    old = MU if bypass else OLD
    for b, t in itertools.product(range(3), range(3)):
        if not MASK[b, t]:
            continue
        weight = weight_of(b, t, config, LOGP if bypass else OLD)
        if bypass:
            weight = float(weight > 0)
        scale = weight / lengths[b] if kind in ("grpo", "gspo") else weight
        for u in range(3):  # gspo: the ratio of a token depends on all of its response
            if not MASK[b, u]:
                continue
            objective, slope = term(kind, b, t, u, config, old)
            gradient[b, u] -= scale * slope
        value -= scale * objective
    squares = (ADV**2).sum()
    divide_by = {
        "dapo": 6.0, "cispo": 6.0, "grpo": 3.0, "gspo": 3.0, "rloo": 3.0,
        "dr_grpo": 3.0 * config.max_response_tokens, "reinforce_pp": 6.0 * (np.sqrt(squares / 2) + 1e-6),
    }[kind]  # fmt: skip
    return value, gradient, divide_by


def term(kind: str, b: int, t: int, u: int, config: LossConfig, old: np.ndarray) -> tuple[float, float]:
    """The objective of token (b, t) and its derivative by LOGP[b, u]."""
    chosen = [v for v in range(3) if MASK[b, v]]
    if kind == "gspo":
        ratio = np.exp(sum(LOGP[b, v] - old[b, v] for v in chosen) / len(chosen))
        share = 1 / len(chosen)
    else:
        ratio, share = np.exp(LOGP[b, t] - old[b, t]), float(t == u)
    bound = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    if kind == "cispo":
        return bound * ADV[b] * LOGP[b, t], bound * ADV[b] * share
    plain, bounded = ratio * ADV[b], bound * ADV[b]
    objective, slope = (plain, plain * share) if plain <= bounded else (bounded, 0.0)
    if (
        kind != "gspo"
        and config.dual_clip is not None
        and ADV[b] < 0
        and objective < config.dual_clip * ADV[b]
    ):
        return config.dual_clip * ADV[b], 0.0
    return objective, slope


def tensors() -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float64) for x in (LOGP, OLD, MU, ADV, MASK)]


CORRECTIONS = [
    {"importance_cap": 2.0},
    {"importance_cap": None},
    {"importance_cap": 1.1, "dual_clip": 1.5, "clip_low": 0.9, "clip_high": 9.0},
    {"importance": "icepop", "importance_cap": 2.0, "importance_floor": 0.95, "dual_clip": None},
    {"importance": "sequence_mask", "importance_cap": 1.2},
    {"clip_low": 3e-4, "clip_high": 4e-4, "importance_cap": 1.5},
    {"clip_low": 0.99, "clip_high": 9.0, "dual_clip": None},
]


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("changes", CORRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_value_gradient_and_divisor_agree_with_the_formula(kind, changes, bypass):
    config = LossConfig(kind, **{"clip_low": 0.2, "clip_high": 0.28, "max_response_tokens": 7, **changes})
    logp, old, mu, adv, mask = tensors()
    logp.requires_grad_()
    sums = policy_loss(logp, old, mu, adv, mask, config, bypass=bypass)
    value, gradient, divide_by = expected(kind, config, bypass)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(logp.grad.numpy(), gradient, rtol=1e-12, atol=1e-15)
    assert divisor(sums.totals, config) == pytest.approx(divide_by, rel=1e-12)
    assert sums.totals == Totals(6.0, 3.0, 5.25)


def test_the_cases_above_reach_every_branch():
    """A golden test whose numbers never clip, drop or bound proves little."""
    reached = set()
    for kind, changes, bypass in itertools.product(KINDS, CORRECTIONS, (False, True)):
        config = LossConfig(kind, **{"clip_low": 0.2, "clip_high": 0.28, **changes})
        logp, old, mu, adv, mask = tensors()
        sums = policy_loss(logp, old, mu, adv, mask, config, bypass=bypass)
        reached |= {(kind, "clipped", sums.clipped > 0), (config.importance, "corrected", sums.corrected > 0)}
    assert reached >= {(kind, "clipped", yes) for kind in set(KINDS) - {"gspo"} for yes in (True, False)}
    assert ("gspo", "clipped", True) in reached
    assert reached >= {(kind, "corrected", True) for kind in ("token", "icepop", "sequence_mask")}


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
    assert (divisor(dapo.totals, LossConfig("dapo")), divisor(grpo.totals, LossConfig("grpo"))) == (3.0, 2.0)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_in_any_order_give_the_gradient_of_the_whole(kind):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 5, generator=generator)
    old, mu = logits + 0.3 * torch.randn(8, 5, generator=generator), logits + 0.1
    adv = torch.randn(8, generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (8, 1), generator=generator)).float()
    config = LossConfig(kind, max_response_tokens=5)

    def gradient(batches: list[list[int]]) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        totals = Totals()
        for rows in batches:
            sums = policy_loss(leaf[rows], old[rows], mu[rows], adv[rows], mask[rows], config)
            sums.loss.backward()
            totals += sums.totals
        return leaf.grad / divisor(totals, config)

    whole = gradient([list(range(8))])
    draw = np.random.default_rng(2)
    splits = [[[3], [0, 7], [1, 2, 4, 5, 6]], [[i] for i in range(8)]]
    for _ in range(5):
        order, cuts = draw.permutation(8).tolist(), sorted(draw.integers(0, 9, 3).tolist())
        parts = [order[a:b] for a, b in itertools.pairwise([0, *cuts, 8])]
        splits.append([part for part in parts if part])
    for batches in splits:
        torch.testing.assert_close(gradient(batches), whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_divided_is_the_paper_s_mean(kind):
    """Sum over divisor against the mean written the other way round: advantages normalised beforehand."""
    logp, old, _, adv, mask = tensors()
    adv = adv - adv.mean()
    config = LossConfig(kind, 0.2, 0.28, None, None, max_response_tokens=7)
    sums = policy_loss(logp, old, old, adv, mask, config)
    found = sums.loss.item() / divisor(sums.totals, config)
    beforehand = adv / (adv.std() + 1e-6) if kind == "reinforce_pp" else adv
    ratio = torch.exp(torch.nan_to_num(logp - old, posinf=0.0)) * mask
    if kind == "gspo":
        mean = (torch.nan_to_num(logp - old, posinf=0.0) * mask).sum(1) / mask.sum(1)
        s = mean.exp()
        wanted = -torch.minimum(s * adv, s.clamp(0.8, 1.28) * adv).mean()
    elif kind == "cispo":
        wanted = -(ratio.clamp(0.8, 1.28) * adv[:, None] * torch.nan_to_num(logp, posinf=0.0))[
            mask > 0
        ].mean()
    else:
        terms = (
            -torch.minimum(ratio * beforehand[:, None], ratio.clamp(0.8, 1.28) * beforehand[:, None]) * mask
        )
        wanted = {
            "grpo": (terms.sum(1) / mask.sum(1)).mean(), "dapo": terms.sum() / mask.sum(),
            "dr_grpo": terms.sum() / (3 * 7), "rloo": terms.sum(1).mean(), "reinforce_pp": terms.sum() / 6,
        }[kind]  # fmt: skip
    assert found == pytest.approx(wanted.item(), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_one_is_reinforce_with_a_baseline(kind):
    logp = torch.tensor([[-0.2, -1.0], [-2.0, -0.1]]).requires_grad_()
    same = logp.detach()
    adv, mask = torch.tensor([0.7, -1.3]), torch.ones(2, 2)
    policy_loss(logp, same, same, adv, mask, LossConfig(kind)).loss.backward()
    per_token = 0.5 if kind in ("grpo", "gspo") else 1.0  # mean over the two tokens of a response
    torch.testing.assert_close(logp.grad, -per_token * adv.unsqueeze(1).expand(2, 2))


def test_grpo_dapo_and_gspo_agree_when_all_lengths_are_one():
    logp, old, mu = (torch.randn(6, 1, generator=torch.Generator().manual_seed(i)) for i in range(3))
    adv, mask = torch.randn(6, generator=torch.Generator().manual_seed(4)), torch.ones(6, 1)
    configs = [LossConfig(kind, dual_clip=None) for kind in ("grpo", "dapo", "gspo")]
    found = [policy_loss(logp, old, mu, adv, mask, config) for config in configs]
    assert [each.loss.item() for each in found] == pytest.approx([found[0].loss.item()] * 3)
    assert {divisor(each.totals, config) for each, config in zip(found, configs, strict=True)} == {6.0}


def test_cispo_without_bounds_is_the_importance_weighted_policy_gradient():
    """grad of sum r A = sum r A grad log pi: what every clipped loss is inside its bounds."""
    logp = torch.tensor([[-0.2, -1.0], [-2.0, -0.1]]).requires_grad_()
    old, adv = torch.tensor([[-1.0, -1.5], [-0.3, -2.0]]), torch.tensor([0.7, -1.3])
    wide = {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None, "importance_cap": None}
    policy_loss(logp, old, old, adv, torch.ones(2, 2), LossConfig("cispo", **wide)).loss.backward()
    weighted = -(torch.exp(logp.detach() - old) * adv[:, None])
    torch.testing.assert_close(logp.grad, weighted)
    logp.grad = None
    policy_loss(logp, old, old, adv, torch.ones(2, 2), LossConfig("dapo", **wide)).loss.backward()
    torch.testing.assert_close(logp.grad, weighted)


def test_cispo_takes_no_token_s_gradient_away():
    logp = torch.tensor([[3.0, -3.0]]).requires_grad_()
    policy_loss(
        logp, torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([1.0]), torch.ones(1, 2),
        LossConfig("cispo", 1.0, 4.0),
    ).loss.backward()  # fmt: skip
    torch.testing.assert_close(logp.grad, torch.tensor([[-5.0, -np.exp(-3.0)]], dtype=torch.float32))


def test_importance_cap_bounds_the_weight_and_carries_no_gradient():
    logp = torch.tensor([[0.0, 0.0]]).requires_grad_()
    old, mu = torch.zeros(1, 2), torch.tensor([[-5.0, 1.0]])  # weights e^5 and e^-1
    policy_loss(logp, old, mu, torch.tensor([1.0]), torch.ones(1, 2), LossConfig("dapo")).loss.backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-2.0, -np.exp(-1.0)]], dtype=torch.float32))


def test_rows_without_a_token_add_nothing():
    zero = torch.zeros(2, 3)
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    for kind in KINDS:
        sums = policy_loss(zero, zero, zero, torch.ones(2), mask, LossConfig(kind))
        assert sums.totals == Totals(2.0, 1.0, 1.0)
    assert divisor(Totals(), LossConfig("dr_grpo")) == 0


def test_advantages_use_the_sample_standard_deviation():
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))[0].numpy()
    np.testing.assert_allclose(found, (np.array([1, 0, 0, 0]) - 0.25) / (0.5 + 1e-6), rtol=1e-6)


def test_advantages_of_equal_rewards_are_zero_also_where_the_mean_rounds():
    rewards = torch.tensor([[0.1] * 7, [1 / 3] * 7], dtype=torch.float32)
    assert not group_advantages(rewards).any()
    large = torch.tensor([[1e9 + 0.1] * 7, [-3e12 / 7] * 7], dtype=torch.float64)
    assert not group_advantages(large).any()
    assert group_advantages(large + torch.tensor([1.0, *[0.0] * 6])).any()


@pytest.mark.parametrize("kind", KINDS)
def test_advantages_ignore_shift_and_follow_scale_only_without_a_std(kind):
    rewards = torch.tensor([[0.2, 0.9, 0.4, 0.1], [0.0, 1.0, 1.0, 0.5]])
    scale = 3.0 if kind in ("dr_grpo", "rloo", "reinforce_pp") else 1.0
    found, plain = group_advantages(3 * rewards - 7, kind=kind), group_advantages(rewards, kind=kind)
    torch.testing.assert_close(found, scale * plain, rtol=1e-4, atol=1e-5)
    assert plain.sum(dim=1).abs().max() < 1e-5


def test_advantages_of_each_kind():
    rewards = np.array([1.0, 0.0, 0.0, 3.0])

    def of(kind: str) -> np.ndarray:
        return group_advantages(torch.tensor(rewards).unsqueeze(0), kind=kind)[0].numpy()

    centred = rewards - rewards.mean()
    for kind in ("grpo", "dapo", "gspo", "cispo"):
        np.testing.assert_allclose(of(kind), centred / (rewards.std(ddof=1) + 1e-6), rtol=1e-6)
    for kind in ("dr_grpo", "reinforce_pp"):
        np.testing.assert_allclose(of(kind), centred, rtol=1e-6)
    others = np.array([(rewards.sum() - r) / 3 for r in rewards])
    np.testing.assert_allclose(of("rloo"), rewards - others, rtol=1e-6)


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
    assert (found["mismatch_tokens"], found["lag_tokens"]) == (2, 0)
    assert "lag_kl" not in found


def test_tokens_of_older_weights_count_as_lag_and_not_as_mismatch():
    old, mu = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.5]])
    sums = mismatch(old, mu, torch.ones(1, 2))
    fresh, stale = sums.metrics(), sums.metrics(staleness=1)
    assert stale["lag_kl"] == fresh["mismatch_kl"] > 0
    assert (stale["mismatch_tokens"], stale["lag_tokens"]) == (0, 2)
    assert {"mismatch_kl", "mismatch_abs_mean", "mismatch_abs_max"}.isdisjoint(stale)


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
        (sums.loss / divisor(sums.totals, LossConfig())).backward()
        return logits.grad

    exact_logits = pi_logits.clone().requires_grad_()
    (-(torch.softmax(exact_logits, dim=0) * adv).sum()).backward()
    corrected, plain = estimate(2.0) - exact_logits.grad, estimate(None) - exact_logits.grad
    assert corrected.norm() < 0.3 * plain.norm()
