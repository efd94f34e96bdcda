"""Which norms become one kernel, and that they stay the same function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlboost_runtime.trainer.kernels import head, norms
from rlboost_runtime.trainer.kernels.checks import TOLERANCE, KernelShape, norms_error, products_error
from rlboost_runtime.trainer.kernels.head import token_logprobs
from rlboost_runtime.trainer.kernels.norms import fused_norm, use_fused_norms

CPU = torch.device("cpu")
SHAPE = KernelShape(hidden=64, heads=4, kv_heads=2, head_dim=32)
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "num"), [(Qwen3Config, 9), (LlamaConfig, 5), (Qwen3MoeConfig, 9), (Gemma3TextConfig, 0)]
)
def test_only_plain_norms_are_replaced(
    kind: type[PreTrainedConfig], num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's add one to their weight."""
    model, calls = AutoModelForCausalLM.from_config(kind(**SIZES)), []
    ids = torch.arange(12).view(1, -1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_()
        plain = model(ids).logits
        monkeypatch.setattr(norms, "fused_norm", lambda *args: calls.append(1) or fused_norm(*args))
        use_fused_norms(model, is_on=True)
        use_fused_norms(model, is_on=True)
        assert torch.allclose(model(ids).logits, plain, atol=1e-5)
        assert len(calls) == num
        use_fused_norms(model, is_on=False)
        assert torch.equal(model(ids).logits, plain)
    assert len(calls) == num


def test_a_norm_that_centers_first_is_left_alone() -> None:
    class CenteredRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, hidden: Tensor) -> Tensor:
            return fused_norm(hidden - hidden.mean(-1, keepdim=True), self.weight, self.eps)

    model = CenteredRMSNorm()
    use_fused_norms(model, is_on=True)
    assert "forward" not in model.__dict__


def wide(one: Tensor, other: Tensor, onto: Tensor | None = None) -> Tensor:
    """What `wide_product` is on a GPU."""
    product = one.float() @ other.float()
    return product if onto is None else onto.add_(product)


WRONG: dict[str, Callable[..., Tensor]] = {
    "rounded": lambda one, other, onto=None: wide(one, other, onto) * 1.05,
    "not added": lambda one, other, onto=None: (
        wide(one, other) if onto is None else onto.copy_(wide(one, other))
    ),
}


def test_a_right_norm_and_right_products_agree_and_wrong_ones_do_not() -> None:
    limit = TOLERANCE[torch.bfloat16]
    assert norms_error(SHAPE, CPU, torch.bfloat16) <= limit
    assert norms_error(SHAPE, CPU, torch.bfloat16, lambda x, w, eps: fused_norm(x, w + 1, eps)) > limit
    assert products_error(SHAPE, CPU, torch.bfloat16, wide) <= limit
    for product in WRONG.values():
        assert products_error(SHAPE, CPU, torch.bfloat16, product) > limit


def test_logprobs_by_wide_products_are_those_of_the_plain_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wide_product` itself needs a GPU; what is done with it does not."""
    monkeypatch.setattr(head, "wide_product", wide)
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * 50 * 7)
    monkeypatch.setattr(head, "KEEP_BYTES", 0)
    torch.manual_seed(0)
    inputs = torch.randn(20, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    targets = torch.randint(0, 50, (20,))
    found = []
    for is_wide in (False, True):
        hidden, weight = (each.clone().requires_grad_() for each in inputs)
        logprobs, entropies = token_logprobs(hidden, weight, targets, 0.8, wide=is_wide)
        (logprobs + 0.1 * entropies).sum().backward()
        found.append([logprobs.detach(), entropies.detach(), hidden.grad, weight.grad])
    for plain, other in zip(*found, strict=True):
        assert plain is not None
        assert other is not None
        assert (plain.float() - other.float()).norm() <= 0.01 * plain.float().norm()
        assert other.dtype is plain.dtype
