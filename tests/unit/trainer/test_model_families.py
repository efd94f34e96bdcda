"""Models with experts and with windows of attention: packed rows, the files' tensors, memory."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma2Config, MixtralConfig, Qwen2MoeConfig

from rlboost_runtime.engines.transformers import model_loading
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.file_tensors import FileLayout
from rlboost_runtime.job import Algorithm, Job, Trainer
from rlboost_runtime.trainer.artifacts.publisher import WeightsCopy
from rlboost_runtime.trainer.kernels import head
from rlboost_runtime.trainer.learn.loading import find_stored, hollow_model
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.facts import look_at_model
from rlboost_runtime.trainer.models.tiny import make_tokenizer
from tests.model_families import SHAPE, WINDOW, random_model

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["qwen3_moe", "gemma3", "mistral"]
PROMPTS = [[5, 6, 7, 8, 9], [1], [40, 41], [3, 3, 3]]
RESPONSES = [[10, 11], list(range(20, 20 + 5 * WINDOW)), [30], [50, 51, 52]]


def policy_of(family: str, **changes: Any) -> Policy:
    return Policy(random_model(family, **changes), make_tokenizer())


def weighted(policy: Policy) -> tuple[Tensor, Tensor]:
    """Logprobs, and the gradient of a weighted sum of them."""
    found = policy.forward(PROMPTS, RESPONSES, 0.7)
    weights = torch.linspace(-1, 2, found.mask.numel()).view_as(found.mask)
    (found.logprobs * weights * found.mask).sum().backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad(set_to_none=True)
    return found.logprobs[found.mask > 0].detach(), torch.cat(gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_gives_the_logprobs_and_gradients_of_padded_rows(family: str) -> None:
    """Those of the model's own attention and masks; the longest sequence is five windows long."""
    policy = policy_of(family)
    assert policy.scorer.why_not_packed is None
    packed = weighted(policy)
    policy.scorer.why_not_packed = "the reference"
    for mine, plain in zip(packed, weighted(policy), strict=True):
        assert (mine - plain).norm() <= 1e-5 * plain.norm()


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 1])
def test_a_window_ends_at_the_border_of_its_sequence(family: str, length: int) -> None:
    """The second sequence is the same behind any first one; in its own row, tokens farther than all layers'
    windows reach are not seen, and nearer ones are."""
    kinds = None if family == "mistral" else ["sliding_attention"] * 3
    policy, response = policy_of(family, layer_types=kinds), list(range(60, 60 + length))
    with torch.no_grad():
        alone = policy.forward([[7, 8]], [response], 1.0).logprobs[0]
        for before in ([1, 2, 3], [9, 9, 9, 9, 9, 9, 9, 9]):
            both = policy.forward([[4], [7, 8]], [before, response], 1.0).logprobs[1, :length]
            torch.testing.assert_close(both, alone, rtol=1e-5, atol=1e-5)
        layers = policy.model.config.num_hidden_layers
        reach = layers * (WINDOW - 1) + 1  # tokens back from the one that predicts, itself included
        far = policy.forward([[7, 8]], [[*response, *range(100, 100 + reach)]], 1.0).logprobs[0, -1]
        changed = policy.forward([[7, 99]], [[*response, *range(100, 100 + reach)]], 1.0).logprobs[0, -1]
        seen = policy.forward([[7, 8]], [[*response, 99, *range(101, 100 + reach)]], 1.0).logprobs[0, -1]
        assert torch.equal(far, changed)
        assert not torch.equal(far, seen)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Gemma2Config(**SHAPE, sliding_window=WINDOW), "attn_logit_softcapping|final_logit_softcapping"),
    ],
)
def test_attention_that_is_more_than_ours_stays_on_padded_rows(config: Any, why: str) -> None:
    policy = Policy(AutoModelForCausalLM.from_config(config).eval(), make_tokenizer())
    assert policy.scorer.why_not_packed is not None
    assert any(each in policy.scorer.why_not_packed for each in why.split("|"))


# --- the files' tensors -------------------------------------------------------------------------------------


def write_version(policy: Policy, path: Path) -> dict[str, Tensor]:
    copy = WeightsCopy("float32")
    copy.take(policy.weights())
    copy.write(path)
    return load_file(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_versions_and_the_final_model_have_the_names_that_save_pretrained_writes(
    family: str, tmp_path: Path
) -> None:
    policy = policy_of(family)
    policy.model.save_pretrained(tmp_path / "wanted")
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    assert ("model.layers.1.mlp.experts.7.gate_proj.weight" in wanted) == (family == "qwen3_moe")
    policy.export(tmp_path / "final")
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    for found in (
        write_version(policy, tmp_path / "version.safetensors"),
        load_file(tmp_path / "final" / "model.safetensors"),
        load_file(tmp_path / "saved" / "model.safetensors"),
    ):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    again = Policy.load(tmp_path / "saved")
    assert not hasattr(again.model, "_weight_conversions"), "names do not depend on how it was loaded"
    assert dict(again.weights()).keys() == wanted.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_any_rows_of_a_weight_are_read_from_the_files(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    hollow = hollow_model(tmp_path)
    stored = find_stored(tmp_path, hollow)
    assert stored is not None
    for name, weight in model.named_parameters():
        for start, stop in ((0, len(weight)), (1, 3), (len(weight) - 1, len(weight)), (2, 2)):
            assert torch.equal(stored.rows(name, start, stop), weight[start:stop]), name
    stored.close()


def test_mixtures_of_several_families_are_views_of_what_is_in_memory() -> None:
    experts = {"num_hidden_layers": 1, "moe_intermediate_size": 32}
    for config, experts_of in (
        (MixtralConfig(**SHAPE, num_local_experts=4), "block_sparse_moe.experts.3.w2.weight"),
        (Qwen2MoeConfig(**(SHAPE | experts), num_experts=4), "mlp.experts.3.down_proj.weight"),
        (
            DeepseekV3Config(**(SHAPE | experts), n_routed_experts=4, first_k_dense_replace=0, n_group=1,
                             topk_group=1),
            "mlp.experts.3.down_proj.weight",
        ),
    ):  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layout = FileLayout.of(model)
        names = [part.name for name in model.state_dict() for part in layout.parts(name)]
        assert f"model.layers.0.{experts_of}" in names
        assert len(names) == len(set(names))
        assert all(layout.can_read_rows(name) for name in model.state_dict())


@pytest.mark.parametrize("family", ["qwen3_moe", "mistral"])
def test_an_engine_takes_a_version_whole_or_not_at_all(family: str, tmp_path: Path) -> None:
    policy, other = policy_of(family), random_model(family, seed=1)
    policy.export(tmp_path)
    engine = model_loading.build_model(tmp_path, torch.float32, torch.device("cpu"))
    model_loading.load_weights(engine, tmp_path)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(engine.state_dict()[name], tensor), name
    other.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if "layers.1.mlp" in name and name.endswith("down_proj.weight"))
    for change in (
        lambda found: found.pop(lost),
        lambda found: found.update(unknown=torch.zeros(1)),
        lambda found: found.update({lost: torch.zeros(1, 2)}),
    ):
        broken = dict(tensors)
        change(broken)
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(model_loading.Unloadable, match=r"missing|not the model's|has shape"):
            model_loading.load_weights(engine, tmp_path)
        assert torch.equal(engine.state_dict()["model.norm.weight"], policy.model.model.norm.weight)


def test_a_folder_with_experts_is_not_called_broken_unless_it_is(tmp_path: Path) -> None:
    random_model("qwen3_moe").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    fields = {"name": "demo", "model": str(tmp_path), "data": {"reasoning_gym": ["basic_arithmetic"]}}
    job = Job.model_validate_json(json.dumps(fields))
    assert look_at_model(job).num_parameters == sum(p.numel() for p in random_model("qwen3_moe").parameters())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of its model.*experts\.5\.up_proj"):
        look_at_model(job)


# --- memory and precision -----------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that live at once, and the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._saw(tensor.untyped_storage())
        return found

    def _saw(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._lost, key, size)

    def _lost(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_no_logits_of_all_positions_at_8192_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of one response; all logits would be 256 MiB, their gradient as much again. Nor is
    there a mask of all pairs of positions, which has 64 MiB."""
    monkeypatch.setattr(head, "CHUNK_BYTES", 8 * 2**20)
    vocabulary, tokens = 8192, 8192
    policy = policy_of(
        family, vocab_size=vocabulary, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        head_dim=16, intermediate_size=32, max_position_embeddings=tokens, sliding_window=512,
        layer_types=["sliding_attention"] if family == "gemma3" else None,
    )  # fmt: skip
    policy.set_up(Trainer(activation_checkpointing=True), Algorithm())
    with Peak() as peak:
        found = policy.forward([[1]], [list(range(2, 258)) * (tokens // 256)], 1.0)
        (found.logprobs * found.mask).sum().backward()
    logits = 4 * tokens * vocabulary
    assert logits > head.KEEP_BYTES
    print(f"{peak.peak / 2**20:.0f} MiB at once, the largest tensor {peak.largest / 2**20:.0f} MiB")
    assert peak.largest <= head.CHUNK_BYTES
    assert peak.peak < logits / 4


def test_experts_compute_in_bfloat16_where_everything_else_does() -> None:
    """In float32 torch's grouped product would run at a fraction of a GPU's speed."""
    policy = policy_of("qwen3_moe")
    policy.set_up(Trainer(dtype="bfloat16"), Algorithm())
    exact = policy_of("qwen3_moe").forward(PROMPTS, RESPONSES, 1.0)
    kinds: set[torch.dtype] = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "grouped_mm" in str(func):
                kinds.update(each.dtype for each in args[:2])
            return func(*args, **(kwargs or {}))

    with Products():
        found = policy.forward(PROMPTS, RESPONSES, 1.0)
        (found.logprobs * found.mask).sum().backward()
    assert kinds == {torch.bfloat16}
    assert {p.grad.dtype for p in policy.model.parameters() if p.grad is not None} == {torch.float32}
    assert 1e-6 < (found.logprobs - exact.logprobs).abs().max() < 0.3
