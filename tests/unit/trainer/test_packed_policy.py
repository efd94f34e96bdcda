"""The packed forward pass against padded rows and against each sequence alone: values and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm, Lora, TinyModel, Trainer
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import TrainedState, TrainingState
from rlboost_runtime.trainer.artifacts.publisher import WeightsCopy
from rlboost_runtime.trainer.kernels import head as heads
from rlboost_runtime.trainer.kernels.head import token_logprobs
from rlboost_runtime.trainer.learn import lora as adapters
from rlboost_runtime.trainer.learn.learner import Learner, Sample
from rlboost_runtime.trainer.learn.model_files import version_configs
from rlboost_runtime.trainer.learn.packing import micro_batches, pack, padded
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = TinyModel(init="tiny", hidden_size=64, num_layers=2)
PROMPTS = [[5, 6, 7, 8, 9], [1], [40, 41], [3, 3, 3]]
RESPONSES = [[10, 11], [20, 21, 22, 23, 24, 25], [30], [50, 51, 52]]


def make_policy() -> Policy:
    return Policy(make_model(TINY, 64), make_tokenizer())


@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 8, 64])
def test_positions_are_added_as_a_sequence_that_predicts_nothing(multiple: int) -> None:
    policy, batch = make_policy(), pack(PROMPTS, RESPONSES)
    row = padded(batch, multiple)
    length = batch.ids_1S.shape[1]
    assert row.ids_1S.shape[1] == -(-length // multiple) * multiple
    assert torch.equal(row.predicting_N, batch.predicting_N)
    ids_BL = row.ids_1S[0][row.packing.spread_BL].flatten()
    assert torch.equal(ids_BL[row.packing.gather_S], row.ids_1S[0])
    if row is not batch:
        assert row.packing.starts.tolist() == [*batch.packing.starts.tolist(), row.ids_1S.shape[1]]
        assert row.packing.num == batch.packing.num + 1
    with torch.no_grad():
        plain, found = (policy.scorer(each, 1.0)[0] for each in (batch, row))
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "keys", "num", "most"), [(4, 2, 3, 1), (4, 2, 8, 4), (6, 2, 4, 2), (12, 3, 4, 1)]
)
def test_ranks_that_the_heads_cannot_be_shared_among_are_refused(
    heads: int, keys: int, num: int, most: int
) -> None:
    config = Qwen3Config(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=1, head_dim=8,
        num_attention_heads=heads, num_key_value_heads=keys,
    )  # fmt: skip
    policy = Policy(AutoModelForCausalLM.from_config(config), make_tokenizer())
    with pytest.raises(ConfigError, match=f"context_parallel: found {num}, but .* {heads} heads") as raised:
        policy.set_up(Trainer(ranks=num, context_parallel=num), Algorithm())
    assert raised.value.remedy == f"write {most}"


def test_a_model_on_padded_rows_shares_none() -> None:
    policy = Policy(
        AutoModelForCausalLM.from_config(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)),
        make_tokenizer(),
    )
    if policy.scorer.why_not_packed is None:
        policy.scorer.why_not_packed = "for this test"
    with pytest.raises(ConfigError, match="is trained on padded rows"):
        policy.set_up(Trainer(ranks=2, context_parallel=2), Algorithm())


def gradient(policy: Policy) -> torch.Tensor:
    found = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad(set_to_none=True)
    return torch.cat(found)


def scored(policy: Policy, temperature: float = 0.7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs, entropies and the gradient of a weighted sum of the logprobs."""
    found = policy.forward(PROMPTS, RESPONSES, temperature)
    weights = torch.linspace(-1, 2, found.mask.numel()).view_as(found.mask)
    (found.logprobs * weights * found.mask).sum().backward()
    chosen = found.mask > 0
    return found.logprobs[chosen].detach(), found.entropy[chosen], gradient(policy)


def nearly(a: torch.Tensor, b: torch.Tensor, relative: float = 1e-5) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


def test_a_packed_row_gives_what_padded_rows_with_a_mask_give():
    policy = make_policy()
    assert policy.scorer.why_not_packed is None
    packed = scored(policy)
    policy.scorer.why_not_packed = "the reference"
    padded = scored(policy)
    torch.testing.assert_close(packed[0], padded[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[1], padded[1], rtol=1e-5, atol=1e-5)
    assert nearly(packed[2], padded[2])


def test_sequences_of_a_packed_row_do_not_see_one_another():
    policy = make_policy()
    together = policy.forward(PROMPTS, RESPONSES, 1.0)
    for i in range(len(PROMPTS)):
        alone = policy.forward([PROMPTS[i]], [RESPONSES[i]], 1.0)
        torch.testing.assert_close(
            together.logprobs[i][together.mask[i] > 0], alone.logprobs[0], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("config", "packs"),
    [
        (LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2), True),
        (Qwen3Config(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
                     num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=4,
                     max_window_layers=1), True),
        (GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64), True),
    ],
)  # fmt: skip
def test_other_architectures_give_the_logprobs_of_their_own_logits(config, packs):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    policy = Policy(model, make_tokenizer())
    assert (policy.scorer.why_not_packed is None) == packs
    found = policy.forward(PROMPTS, RESPONSES, 1.0)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
        wanted = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(
            1, torch.tensor(response)[:, None]
        )
        torch.testing.assert_close(found.logprobs[i, : len(response)], wanted[:, 0], rtol=1e-5, atol=1e-5)


def test_pack_leaves_the_last_token_out_and_knows_every_place():
    batch = pack([[1, 2], [3]], [[4], [5, 6]])
    assert batch.ids_1S.tolist() == [[1, 2, 3, 5]]
    assert batch.positions_1S.tolist() == [[0, 1, 0, 1]]
    assert batch.packing.starts.tolist() == [0, 2, 4]
    assert (batch.predicting_N.tolist(), batch.targets_N.tolist()) == ([1, 2, 3], [4, 5, 6])
    assert batch.table(torch.tensor([7.0, 8.0, 9.0])).tolist() == [[7, 0], [8, 9]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("budget", [4, 9, 10, 25, 1000])
def test_micro_batches_hold_every_item_once_within_the_budget(budget, num_ranks):
    sizes = [3, 9, 1, 4, 4, 7, 12, 2, 5, 5]
    found = micro_batches(range(10), sizes, budget, num_ranks)
    assert sorted(i for batch in found for i in batch) == list(range(10))
    assert all(sum(sizes[i] for i in batch) <= budget or len(batch) == 1 for batch in found)
    assert len(found) >= num_ranks
    assert found == micro_batches(range(10), sizes, budget, num_ranks)
    assert micro_batches([], [], budget, num_ranks) == []


# --- the head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_logprobs_and_their_gradients_are_exact(monkeypatch, keep, chunk):
    monkeypatch.setattr(heads, "KEEP_BYTES", 10**9 if keep else 0)
    monkeypatch.setattr(heads, "CHUNK_BYTES", chunk * 4 * 11)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, generator=generator).requires_grad_()
    head = torch.randn(11, 5, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(0, 11, (7,), generator=generator)
    upstream = torch.randn(7, generator=generator)
    found, entropy = token_logprobs(hidden, head, targets, 0.6)
    by_hidden, by_head = torch.autograd.grad((found * upstream).sum(), (hidden, head))
    log = torch.log_softmax(hidden @ head.T / 0.6, -1)
    wanted = log.gather(1, targets[:, None]).squeeze(1)
    wanted_hidden, wanted_head = torch.autograd.grad((wanted * upstream).sum(), (hidden, head))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(log.exp() * log).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_hidden, wanted_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_head, wanted_head, rtol=1e-5, atol=1e-5)
    found, entropy = token_logprobs(hidden, head, targets, 0.6)
    by_both = torch.autograd.grad((found * upstream).sum() + (entropy * upstream).sum(), (hidden, head))
    log = torch.log_softmax(hidden @ head.T / 0.6, -1)
    both = log.gather(1, targets[:, None]).squeeze(1) - (log.exp() * log).sum(-1)
    for mine, plain in zip(
        by_both, torch.autograd.grad((both * upstream).sum(), (hidden, head)), strict=True
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_costs_none():
    hidden = torch.randn(4, 3).requires_grad_()
    head = torch.randn(6, 3)
    token_logprobs(hidden, head, torch.tensor([0, 1, 2, 3]), 1.0)[0].sum().backward()
    assert hidden.grad is not None
    assert head.grad is None


# --- memory and precision -----------------------------------------------------------------------------------


def test_activation_checkpointing_changes_nothing_but_memory():
    plain, saving = make_policy(), make_policy()
    saving.set_up(Trainer(activation_checkpointing=True), Algorithm())
    for a, b in zip(scored(saving), scored(plain), strict=True):
        assert nearly(a, b, 1e-6)


def test_activation_checkpointing_stores_less():
    def stored(policy: Policy) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            policy.forward(PROMPTS, RESPONSES, 1.0)
        return sum(sizes)

    plain, saving = make_policy(), make_policy()
    saving.set_up(Trainer(activation_checkpointing=True), Algorithm())
    assert stored(saving) < 0.5 * stored(plain)


def test_bfloat16_arithmetic_leaves_weights_and_gradients_in_float32():
    exact, short = make_policy(), make_policy()
    short.set_up(Trainer(dtype="bfloat16"), Algorithm())
    logprobs, _, by_weights = scored(short)
    wanted, _, wanted_by_weights = scored(exact)
    assert {p.dtype for p in short.model.parameters()} == {torch.float32}
    assert logprobs.dtype == by_weights.dtype == torch.float32
    assert 1e-6 < (logprobs - wanted).abs().max() < 0.1
    assert nearly(by_weights, wanted_by_weights, 0.05)


def train(policy: Policy, trainer: Trainer, **changes) -> Learner:
    algorithm = Algorithm(learning_rate=1e-2, learning_rate_warmup_steps=0, **changes)
    policy.set_up(trainer, algorithm)
    learner = Learner(policy, algorithm, trainer)
    for step in range(2):
        learner.begin_step(step)
        learner.accumulate(
            [
                Sample.of(p, r, [-5.0] * len(r), 1.0 - i)
                for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
            ]
        )
        learner.apply()
    return learner


def test_an_offloaded_optimizer_takes_the_same_steps():
    one, other = make_policy(), make_policy()
    train(one, Trainer())
    train(other, Trainer(optimizer_offload=True))
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# --- adapters -----------------------------------------------------------------------------------------------


def write_version(folder: Path, policy: Policy) -> None:
    copy = WeightsCopy("float32")
    copy.take(policy.weights())
    copy.write(folder / "model.safetensors")
    for name, content in version_configs(policy.model, "float32").items():
        (folder / name).write_bytes(content)


def test_fresh_adapters_change_nothing_and_trained_ones_merge_to_the_same_logits(tmp_path):
    policy, plain = make_policy(), make_policy()
    before = plain.forward(PROMPTS, RESPONSES, 1.0).logprobs
    learner = train(policy, Trainer(), lora=Lora(rank=4))
    assert learner.optimizer.param_groups[0]["params"]
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    after = policy.forward(PROMPTS, RESPONSES, 1.0).logprobs
    assert (after - before).abs().max() > 0.01
    for write in (
        policy.export,
        lambda folder: write_version(folder, policy),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        write(folder)
        policy.tokenizer.save_pretrained(folder)
        merged = Policy.load(folder)
        assert not any("lora" in name for name, _ in merged.model.named_parameters())
        torch.testing.assert_close(merged.forward(PROMPTS, RESPONSES, 1.0).logprobs, after, rtol=0, atol=1e-4)


def test_the_final_model_is_what_engines_serve_under_the_names_that_transformers_writes(tmp_path):
    policy = make_policy()
    policy.export(tmp_path / "found", "bfloat16")
    policy.model.to(torch.bfloat16).save_pretrained(tmp_path / "wanted")
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("found", "wanted"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert json.loads((tmp_path / "found" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "found" / "tokenizer.json").exists()


def test_fresh_adapters_are_the_plain_model():
    policy, plain = make_policy(), make_policy()
    policy.set_up(Trainer(), Algorithm(lora=Lora(rank=4)))
    found = policy.forward(PROMPTS, RESPONSES, 1.0).logprobs
    torch.testing.assert_close(found, plain.forward(PROMPTS, RESPONSES, 1.0).logprobs, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_with_adapters_goes_on_exactly(tmp_path):
    policy = make_policy()
    learner = train(policy, Trainer(), lora=Lora(rank=4))
    state = TrainedState(0, 0, 0.0, 0.0, 0, 0.0, {})
    folder = checkpoint.write(tmp_path, TrainingState(learner).take(tmp_path), state, keep=1)
    again = Policy.load(folder)
    again.set_up(Trainer(), Algorithm(lora=Lora(rank=4)))
    stored, loaded = policy.model.state_dict(), again.model.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
    with pytest.raises(ConfigError, match="other shapes"):
        Policy.load(folder).set_up(Trainer(), Algorithm(lora=Lora(rank=8)))
    with pytest.raises(ConfigError, match="the job asks for none"):
        Policy.load(folder).set_up(Trainer(), Algorithm())


def test_merging_is_the_formula():
    state = {
        "q.base_layer.weight": torch.ones(2, 3), "q.lora_A.default.weight": torch.tensor([[1.0, 2.0, 3.0]]),
        "q.lora_B.default.weight": torch.tensor([[1.0], [-1.0]]), "norm.weight": torch.zeros(3),
    }  # fmt: skip
    found = adapters.merged(state, Lora(rank=1, alpha=3))
    assert sorted(found) == ["norm.weight", "q.weight"]
    assert found["q.weight"].tolist() == [[4, 7, 10], [-2, -5, -8]]
