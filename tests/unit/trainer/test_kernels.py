"""The trials that decide which kernels are used: what agrees passes, what is wrong by one token does not."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.trainer.kernels import checks
from rlboost_runtime.trainer.kernels.attention import padded_attention
from rlboost_runtime.trainer.kernels.checks import (
    KernelShape,
    adamw_error,
    attention_error,
    choose_kernels,
    experts_error,
    head_error,
    trials_on,
)
from rlboost_runtime.trainer.kernels.experts import grouped_experts
from rlboost_runtime.trainer.kernels.head import token_logprobs
from rlboost_runtime.trainer.learn import policy as policies
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import make_tokenizer
from tests.model_families import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = KernelShape(hidden=64, heads=4, kv_heads=2, head_dim=32, expert_width=48)
CPU = torch.device("cpu")
KINDS = [torch.float32, torch.bfloat16]


def by_sequence(wider: int = 0, *, is_causal: bool = True) -> Callable[..., Tensor]:
    """Attention on a packed row, one sequence after the other, with a window wrong by `wider`."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: int, scaling: float, window: int | None
    ) -> Tensor:
        found = []
        for start, end in itertools.pairwise(starts.tolist()):
            heads = [each[start:end].transpose(0, 1)[None] for each in (q, k, v)]
            if is_causal:
                one = padded_attention(*heads, scaling, None if window is None else window + wider)
            else:
                one = torch.nn.functional.scaled_dot_product_attention(*heads, scale=scaling, enable_gqa=True)
            found.append(one[0].transpose(0, 1))
        return torch.cat(found)

    return kernel


@pytest.mark.parametrize("dtype", KINDS)
def test_attention_agrees_or_is_found_out(dtype: torch.dtype) -> None:
    limit = checks.TOLERANCE[dtype]
    assert attention_error(SHAPE, CPU, dtype, by_sequence()) <= limit
    for wrong in (by_sequence(1), by_sequence(-1), by_sequence(is_causal=False)):
        assert attention_error(SHAPE, CPU, dtype, wrong) > 3 * limit


@pytest.mark.parametrize("dtype", KINDS)
def test_grouped_experts_agree_or_are_found_out(dtype: torch.dtype) -> None:
    """The real grouped product of this torch, for CPUs."""
    limit = checks.TOLERANCE[dtype]
    assert experts_error(SHAPE, CPU, dtype) <= limit

    def unweighted(module: Any, hidden: Tensor, of: Tensor, weights: Tensor) -> Tensor:
        return grouped_experts(module, hidden, of, torch.ones_like(weights))

    def shifted(module: Any, hidden: Tensor, of: Tensor, weights: Tensor) -> Tensor:
        return grouped_experts(module, hidden, (of + 1) % module.num_experts, weights)

    for wrong in (unweighted, shifted):
        assert experts_error(SHAPE, CPU, dtype, wrong) > 3 * limit


def test_the_head_agrees_or_is_found_out() -> None:
    def ours(temperature: float | None = None) -> Callable[..., Tensor]:
        return lambda hidden, head, targets, given: token_logprobs(
            hidden, head, targets, temperature or given
        )[0]

    assert head_error(SHAPE, CPU, torch.bfloat16, ours()) <= checks.TOLERANCE[torch.bfloat16]
    assert head_error(SHAPE, CPU, torch.bfloat16, ours(1.0)) > 3 * checks.TOLERANCE[torch.bfloat16]


def test_the_fused_optimizer_agrees_or_is_found_out() -> None:
    """The real fused AdamW of this torch, for CPUs."""
    assert adamw_error(CPU) <= checks.TOLERANCE[torch.float32]

    def without_decay(weights: Any, *, fused: bool, weight_decay: float, **options: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(weights, fused=fused, weight_decay=0.0 if fused else weight_decay, **options)

    assert adamw_error(CPU, without_decay) > 3 * checks.TOLERANCE[torch.float32]


def test_what_raises_is_not_a_number_or_is_absent_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def raises() -> float:
        raise RuntimeError("no kernel image is available for execution on the device")

    def absent() -> float:
        raise ImportError("No module named 'liger_kernel'")

    trials = {"attention": raises, "experts": lambda: float("inf"), "head": absent, "adamw": lambda: 0.0}
    with caplog.at_level(logging.INFO):
        found = choose_kernels(trials, torch.bfloat16)
    assert found.used == ["adamw"]
    assert set(found.refused) == {"attention", "experts"}, "a package that is not there was not asked for"
    assert "no kernel image" in found.refused["attention"]
    assert "0.02 is allowed" in found.refused["experts"]
    assert checks._apart([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")


def test_on_a_cpu_only_what_it_has_is_tried() -> None:
    assert set(trials_on(SHAPE, CPU, torch.bfloat16)) == {"experts", "adamw"}
    assert set(trials_on(KernelShape(64, 4, 2, 32), CPU, torch.float32)) == {"adamw"}
    on_gpu = trials_on(SHAPE, torch.device("cuda"), torch.bfloat16)
    assert set(on_gpu) == set(checks.NAMES)
    exact = trials_on(SHAPE, torch.device("cuda"), torch.float32)
    assert set(exact) == {"experts", "head", "adamw"}


def step(monkeypatch: pytest.MonkeyPatch, *, agree: bool) -> tuple[Learner, list[Tensor]]:
    policy = Policy(random_model("qwen3_moe"), make_tokenizer())
    before = [weight.detach().clone() for weight in policy.model.parameters()]
    if not agree:
        monkeypatch.setattr(policies, "trials_on", lambda *_: dict.fromkeys(checks.NAMES, lambda: 1.0))
    algorithm = Algorithm(learning_rate=1e-2, learning_rate_warmup_steps=0)
    policy.set_up(Trainer(), algorithm)
    learner = Learner(policy, algorithm)
    learner.begin_step(0)
    learner.accumulate([Sample.of([1, 2], [3, 4, 5], [-5.0] * 3, 1.0), Sample.of([6], [7], [-5.0], -1.0)])
    learner.apply()
    return learner, [new.detach() - old for new, old in zip(policy.model.parameters(), before, strict=True)]


def test_a_step_without_any_fast_kernel_is_the_same_step_and_the_metrics_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, by_fast = step(monkeypatch, agree=True)
    plain, by_plain = step(monkeypatch, agree=False)
    assert fast.metrics()["kernels_refused"] == 0
    assert plain.metrics()["kernels_refused"] == len(checks.NAMES)
    assert fast.policy.model.config._experts_implementation == "grouped_mm"
    assert plain.policy.model.config._experts_implementation == "eager"
    assert [group["fused"] for group in fast.optimizer.param_groups] == [True]
    assert [group["fused"] for group in plain.optimizer.param_groups] == [False]
    for one, other in zip(by_fast, by_plain, strict=True):
        assert (one - other).norm() <= 1e-3 * other.norm()
