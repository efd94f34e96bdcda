"""A mixture's routes: replayed for later mini-batches, and evened by the auxiliary loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig
from transformers.activations import ACT2FN

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm, Trainer
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.ranks import ALONE
from rlboost_runtime.trainer.learn.routing import RoutedPass, Routing
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import make_tokenizer
from tests.model_families import SHAPE, random_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 6, 7, 8, 9], [1], [40, 41]]
RESPONSES = [[10, 11], list(range(20, 40)), [30]]
REPLAYED = {"router_replay": "recompute", "old_logprobs": "recompute", "minibatches_per_step": 2}


def policy_of(family: str, **setup: Any) -> Policy:
    shape = SHAPE | {"num_experts_per_tok": 2}
    configs = {
        "qwen2_moe": lambda: Qwen2MoeConfig(
            **shape, num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=32
        ),
        "mixtral": lambda: MixtralConfig(**shape, num_local_experts=8),
        "olmoe": lambda: OlmoeConfig(**(shape | {"hidden_size": 128}), num_experts=8),
    }
    if family in configs:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configs[family]()).eval()
    else:
        model = random_model(family)
    policy = Policy(model, make_tokenizer())
    policy.set_up(Trainer(**setup), Algorithm(), ALONE)
    return policy


def routing_of(policy: Policy) -> Routing:
    routing = Routing.of(policy.scorer, Algorithm())
    assert routing is not None
    return routing


def passed(
    policy: Policy, routing: Routing, routes: Tensor | None = None
) -> tuple[Tensor, Tensor, RoutedPass]:
    """Logprobs, gradients, and what the routers did."""
    policy.model.zero_grad(set_to_none=True)
    with routing.watched(routes) as routed:
        found = policy.forward(PROMPTS, RESPONSES, 1.0)
        weights = torch.linspace(-1, 2, found.mask.numel()).view_as(found.mask)
        (found.logprobs * weights * found.mask).sum().backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return found.logprobs.detach(), torch.cat(gradients), routed


def change(policy: Policy, by: float = 0.3, of: str = "") -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (each for name, each in policy.model.named_parameters() if name.endswith(of)):
            parameter += by * parameter.std() * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replaying_what_the_weights_prefer_changes_no_bit(family: str, *, checkpointing: bool) -> None:
    policy = policy_of(family, activation_checkpointing=checkpointing)
    routing = routing_of(policy)
    logprobs, gradients, routed = passed(policy, routing)
    again, same, replayed = passed(policy, routing, routed.routes())
    assert routed.routes().shape == (sum(map(len, PROMPTS)) + sum(map(len, RESPONSES)) - 3, 2, 2)
    assert routing.width == 4
    assert torch.equal(logprobs, again)
    assert torch.equal(gradients, same)
    assert (routed.moved(), replayed.moved()) == (0, 0)
    assert routed.num() == routed.routes().numel()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_go_where_they_went_before_the_update(*, checkpointing: bool) -> None:
    policy = policy_of("qwen3_moe", activation_checkpointing=checkpointing)
    routing = routing_of(policy)
    _, _, before = passed(policy, routing)
    change(policy)
    free, _, own = passed(policy, routing)
    logprobs, gradients, replayed = passed(policy, routing, before.routes())
    assert not torch.equal(own.routes(), before.routes())
    assert torch.equal(replayed.routes(), before.routes())
    assert 0 < replayed.moved() < replayed.num()
    assert (logprobs - free).abs().max() > 1e-3
    assert gradients.isfinite().all()
    gates = [p.grad for name, p in policy.model.named_parameters() if name.endswith("gate.weight")]
    assert all(gate is not None and gate.norm() > 0 for gate in gates), "the scores keep their gradient"


def test_replayed_experts_answer_with_the_weights_of_their_present_scores() -> None:
    policy = policy_of("qwen3_moe")
    block: Any = policy.model.model.layers[0].mlp
    routing = Routing([block.gate])
    hidden_SE = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    experts_SK = torch.tensor([[0, 1], [7, 2], [3, 4], [5, 6], [1, 0], [2, 2 + 4]])
    with torch.no_grad(), routing.watched(experts_SK[:, None].short()):
        found = block(hidden_SE[None])[0]
    probabilities = torch.softmax(hidden_SE @ block.gate.weight.T, -1)
    for position, experts in enumerate(experts_SK.tolist()):
        scores = probabilities[position, experts]
        answer = torch.zeros(64)
        for expert, score in zip(experts, scores / scores.sum(), strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ hidden_SE[position]).chunk(2)
            answer += score * (block.experts.down_proj[expert] @ (ACT2FN["silu"](gate) * up))
        torch.testing.assert_close(found[position], answer.detach(), rtol=1e-5, atol=1e-6)


def test_outside_of_a_watched_pass_nothing_is_kept_or_changed() -> None:
    policy = policy_of("qwen3_moe")
    plain = policy.forward(PROMPTS, RESPONSES, 1.0).logprobs.detach()
    routing = routing_of(policy)
    _, _, routed = passed(policy, routing)
    change(policy)
    free = policy.forward(PROMPTS, RESPONSES, 1.0).logprobs.detach()
    with routing.watched(routed.routes()):
        pass
    assert torch.equal(free, policy.forward(PROMPTS, RESPONSES, 1.0).logprobs.detach())
    assert not torch.equal(free, plain)


def imbalance_of(logits_SX: Tensor, used_SK: Tensor) -> float:
    return float(
        RoutedPass(chosen_SK={0: used_SK}, used_SK={0: used_SK}, logits_SX={0: logits_SX}).imbalance()
    )


def test_the_auxiliary_loss_is_1_with_even_loads_and_their_number_with_one_expert() -> None:
    even = torch.arange(8).repeat(2).view(8, 2)
    assert imbalance_of(torch.zeros(8, 8), even) == pytest.approx(1.0)
    all_to_one = torch.full((5, 8), -100.0).index_fill(1, torch.tensor([3]), 100.0)
    assert imbalance_of(all_to_one, torch.full((5, 1), 3)) == pytest.approx(8.0)
    draw = np.random.default_rng(0)
    logits, used = draw.normal(size=(30, 4)), draw.integers(0, 4, (30, 2))
    shares = np.bincount(used.flatten(), minlength=4) / 60
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wanted = 4 * (shares * probabilities.mean(0)).sum()
    assert imbalance_of(torch.from_numpy(logits), torch.from_numpy(used)) == pytest.approx(wanted, rel=1e-5)


# --- the learner --------------------------------------------------------------------------------------------


def samples(seed: int, num: int = 8) -> list[Sample]:
    draw = np.random.default_rng(seed)
    return [
        Sample.of(
            draw.integers(0, 256, 3).tolist(), draw.integers(0, 256, 12).tolist(),
            draw.normal(-5.5, 0.2, 12).tolist(), float(draw.normal()), usable=i != 4,
        )
        for i in range(num)
    ]  # fmt: skip


def learner_of(**changes: Any) -> Learner:
    algorithm = Algorithm(learning_rate=2e-2, learning_rate_warmup_steps=0, max_response_tokens=12, **changes)
    policy = Policy(random_model("qwen3_moe"), make_tokenizer())
    policy.set_up(Trainer(micro_batch_tokens=40), algorithm, ALONE)
    return Learner(policy, algorithm, Trainer(micro_batch_tokens=40))


def two_minibatches(learner: Learner) -> list[Sample]:
    learner.begin_step(0)
    second = learner.recompute(samples(1))
    for batch in (samples(0), second):
        learner.accumulate(batch)
        learner.apply()
    return second


def test_later_minibatches_are_sent_where_the_steps_policy_sent_them() -> None:
    replaying = learner_of(**REPLAYED)
    seen: list[Tensor] = []
    watched = Routing.watched

    def noting(self: Routing, routes: Tensor | None = None) -> Any:
        if routes is not None:
            seen.append(routes)
        return watched(self, routes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Routing, "watched", noting)
        second = two_minibatches(replaying)
    used = [sample for sample in second if sample.usable]
    assert all(sample.routes is not None and len(sample.routes) == 14 * 4 for sample in used)
    assert second[4].routes is None
    assert sum(map(len, seen)) == 14 * len(used)
    rows = {row.numpy().tobytes() for routes in seen for row in routes.view(-1, 14, 4)}
    assert rows == {sample.routes.tobytes() for sample in used if sample.routes is not None}
    metrics = replaying.metrics()
    assert 0 < metrics["router_replay_moved_share"] < 1
    free = learner_of(**(REPLAYED | {"router_replay": None}))
    assert all(sample.routes is None for sample in two_minibatches(free))
    assert free.metrics()["router_replay_moved_share"] == 0
    assert free.metrics()["loss"] != pytest.approx(metrics["loss"], rel=1e-4)


def test_replay_takes_the_jumps_out_of_a_change_of_routers() -> None:
    """What it is for: tokens that go elsewhere change their probabilities by more than new scores do."""
    policy = policy_of("qwen3_moe")
    routing = routing_of(policy)
    old, _, before = passed(policy, routing)
    change(policy, 0.1, of="gate.weight")
    free, _, own = passed(policy, routing)
    held, _, _ = passed(policy, routing, before.routes())
    assert not torch.equal(own.routes(), before.routes())
    assert (held - old).abs().mean() < 0.5 * (free - old).abs().mean()


def test_the_auxiliary_loss_evens_the_loads() -> None:
    found = {}
    for coef in (0.0, 3.0):
        learner = learner_of(router_aux_loss_coef=coef)
        for step in range(6):
            learner.begin_step(step)
            learner.accumulate(samples(0))
            learner.apply()
        found[coef] = learner.metrics()["router_aux_loss"]
    assert 1.0 <= found[3.0] < found[0.0] - 0.02


def test_a_dense_model_has_no_such_metrics_and_no_replay() -> None:
    with pytest.raises(
        ConfigError, match="router_replay: found recompute, but MistralForCausalLM has no routers"
    ):
        Learner(Policy(random_model("mistral"), make_tokenizer()), Algorithm(**REPLAYED))
    learner = Learner(Policy(random_model("mistral"), make_tokenizer()), Algorithm(max_response_tokens=12))
    learner.begin_step(0)
    learner.accumulate(samples(0))
    learner.apply()
    assert "router_aux_loss" not in learner.metrics()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"router_replay": "recompute"}, "write old_logprobs: recompute"),
        (
            {"router_replay": "recompute", "old_logprobs": "recompute"},
            "more than one of minibatches_per_step",
        ),
        ({"router_aux_loss_coef": 0.1, "loss": "reinforce_pp"}, "does not go with reinforce_pp"),
        ({"router_aux_loss_coef": -0.1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Algorithm(**changes)
