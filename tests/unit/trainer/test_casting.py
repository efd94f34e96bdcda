"""Weights that are cast for the forward pass: the same function as that of a model that was cast before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlboost_runtime.job import Algorithm, TinyModel, Trainer
from rlboost_runtime.trainer.kernels.casting import cast_weights
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

PROMPTS, RESPONSES = [[1, 2, 3], [4]], [[5, 6, 7, 8], [9, 10]]


def attributes(model: nn.Module) -> set[str]:
    return {name for module in model.modules() for name in module.__dict__ if name in ("weight", "bias")}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_rank_computes_what_a_model_in_bfloat16_computes(checkpointing: bool) -> None:
    model = make_model(TinyModel(init="tiny", seed=3), 64)
    before = copy.deepcopy(model)
    policy = Policy(model, make_tokenizer())
    policy.set_up(Trainer(dtype="bfloat16", activation_checkpointing=checkpointing), Algorithm())
    found = policy.forward(PROMPTS, RESPONSES, 1.0)
    wanted = Policy(before, make_tokenizer())
    for weight in before.parameters():  # not the buffers: rotary frequencies stay float32
        weight.data = weight.data.bfloat16()
    wanted.scorer.compute_in(torch.bfloat16, casts=False)
    expected = wanted.forward(PROMPTS, RESPONSES, 1.0)
    assert torch.equal(found.logprobs, expected.logprobs)
    (found.logprobs * found.mask).sum().backward()
    (expected.logprobs * expected.mask).sum().backward()
    assert attributes(model) == set(), "nothing is left of the cast weights"
    for weight, other in zip(model.parameters(), wanted.model.parameters(), strict=True):
        assert weight.dtype is torch.float32
        assert weight.grad is not None
        assert other.grad is not None
        assert weight.grad.dtype is torch.float32
        assert torch.equal(weight.grad, other.grad.float())


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.inner.weight.dtype is torch.bfloat16
        raise ValueError("no such input")


def test_a_failed_pass_leaves_the_weights_as_they_are() -> None:
    model = Fails()
    cast_weights(model, [], torch.bfloat16)
    with pytest.raises(ValueError, match="no such input"):
        model(torch.zeros(1, 2))
    assert model.inner.weight.dtype is torch.float32
    assert attributes(model) == set()


def test_a_tied_weight_is_cast_once_and_gets_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.other.weight = self.one.weight

        def forward(self, hidden: Tensor) -> Tensor:
            assert self.one.weight is self.other.weight
            return self.other(self.one(hidden))  # type: ignore[no-any-return]

    model = Tied()
    cast_weights(model, [], torch.bfloat16)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    twice = torch.zeros(3, 3, requires_grad=True)
    twice.data.copy_(model.one.weight.detach())
    (torch.ones(1, 3) @ twice.T @ twice.T).sum().backward()
    assert model.one.weight.grad is not None
    assert twice.grad is not None
    assert torch.allclose(model.one.weight.grad, twice.grad, rtol=0.05, atol=0.05)
