"""The tiny model: tokenizer, determinism, its files and its cache."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Algorithm, Job, PromptFile, TinyModel, Trainer, Warmup
from rlboost_runtime.trainer.artifacts.publisher import WeightsCopy
from rlboost_runtime.trainer.data.reading import Example
from rlboost_runtime.trainer.device.mover import Mover
from rlboost_runtime.trainer.learn.model_files import PROBE_TOLERANCE, next_logprobs, version_configs
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.ranks import Adam
from rlboost_runtime.trainer.models import warmup
from rlboost_runtime.trainer.models.tiny import END_ID, WarmupReport, make_model, make_tokenizer, prepare
from rlboost_runtime.trainer.models.warmup import NUM_HELD_OUT, sample, warm_up, warmup_data

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = TinyModel(init="tiny", hidden_size=32, num_layers=1)


@pytest.fixture
def policy() -> Policy:
    return Policy(make_model(SMALL, 64), make_tokenizer())


def test_any_text_round_trips_one_token_per_byte(policy):
    text = "Spell ünï 漢字 \n\t<x> it's"
    ids = policy.encode(text)
    assert len(ids) == len(text.encode())
    assert policy.decode([*ids, END_ID]) == text
    assert policy.stop_token_ids == {END_ID}


def test_size_and_determinism():
    default = TinyModel(init="tiny")
    model, again, other = (make_model(default.model_copy(update={"seed": s}), 64) for s in (0, 0, 1))
    assert sum(p.numel() for p in model.parameters()) == 328_704
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("hidden", [32, 96, 160])
def test_any_allowed_width_makes_a_model(hidden):
    model = make_model(SMALL.model_copy(update={"hidden_size": hidden}), 64)
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 258)


def test_forward_agrees_with_each_row_alone_and_with_sampling(policy):
    prompts = [policy.encode(text) for text in ("a", "longer prompt", "mid")]
    sampled = sample(policy, prompts, max_new_tokens=7, temperature=0.7, seed=3)
    responses = [s.token_ids for s in sampled]
    together = policy.forward(prompts, responses, 0.7)
    for i, one in enumerate(sampled):
        alone = policy.forward([prompts[i]], [responses[i]], 0.7)
        found = together.logprobs[i][together.mask[i] > 0]
        torch.testing.assert_close(found, alone.logprobs[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, torch.tensor(one.logprobs), rtol=1e-4, atol=1e-5)
    assert (together.mask.sum(dim=1).int().tolist()) == [len(r) for r in responses]
    assert together.entropy[together.mask > 0].max() <= torch.log(torch.tensor(258.0)) + 1e-4


def test_sampling_is_seeded_and_stops_at_end_of_text(policy):
    prompts = [policy.encode("ab")] * 40
    one, again, other = (
        sample(policy, prompts, max_new_tokens=5, temperature=1.0, seed=s) for s in (1, 1, 2)
    )
    assert one == again != other
    assert all(s.stopped == (s.token_ids[-1] == END_ID) for s in one)
    greedy = sample(policy, prompts[:1], max_new_tokens=5, temperature=0, seed=1)[0]
    probe = policy.probe(prompts[0], "float32")
    assert list(probe.next_token_ids[:5]) == greedy.token_ids
    assert list(probe.logprobs[:5]) == pytest.approx(greedy.logprobs, abs=1e-4)


def write_version(folder, policy: Policy, dtype: str) -> None:
    copy = WeightsCopy(dtype)
    copy.take(policy.weights())
    copy.write(folder / "model.safetensors")
    for name, content in version_configs(policy.model, dtype).items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weight_files(policy, tmp_path, dtype, kind):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        write_version(folder, policy, dtype)
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in first.iterdir()) == names
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    state = load_file(first / "model.safetensors")
    assert "lm_head.weight" not in state
    assert {tensor.dtype for tensor in state.values()} == {kind}
    assert json.loads((first / "config.json").read_text())["dtype"] == dtype
    assert json.loads((first / "generation_config.json").read_text())["eos_token_id"] == END_ID
    assert policy.model.dtype is torch.float32


def test_a_saved_policy_is_the_same_policy(policy, tmp_path):
    policy.save(tmp_path)
    again = Policy.load(tmp_path)
    assert again.encode("xyz") == policy.encode("xyz")
    pairs = zip(again.model.state_dict().values(), policy.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_model_that_cannot_be_loaded_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Policy.load(tmp_path)


def test_giving_the_device_back_keeps_gradients_and_state(policy):
    optimizer = Adam(policy.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    policy.forward([[1]], [[2, 3]], 1.0).logprobs.sum().backward()
    before = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
    residency = Residency(policy, optimizer)
    for _ in range(2):
        residency.free()
        residency.free()
        residency.take()
    after = [p.grad for p in policy.model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_it_stays_off_the_gpu_until_that_is_ours(monkeypatch):
    """A trainer that comes back may find engines awake there."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        policy = Policy(make_model(SMALL, 64), make_tokenizer())
    assert (policy.device.type, policy.mover.device.type) == ("cpu", "cuda")
    optimizer = Adam(policy.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    Residency(policy, optimizer).free()
    assert policy.probe([1], "float32").next_token_ids
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|nvidia"):  # now it would go there
        Residency(policy, optimizer).take()


@pytest.mark.parametrize(
    ("asked", "has_gpu", "used"),
    [
        ("auto", True, torch.bfloat16), ("auto", False, torch.float32),
        ("float32", True, torch.float32), ("bfloat16", False, torch.bfloat16),
    ],
)  # fmt: skip
def test_arithmetic_is_bfloat16_on_gpus_unless_the_job_says_otherwise(asked, has_gpu, used):
    mover = Mover(torch.device("cuda" if has_gpu else "cpu"))
    policy = Policy(make_model(SMALL, 64), make_tokenizer(), mover=mover)
    policy.set_up(Trainer(dtype=asked), Algorithm())
    assert policy.scorer.compute_dtype is used
    assert policy.model.dtype is torch.float32, "weights stay as they are"
    coarser = "float32" if used is torch.float32 else "bfloat16"
    assert policy.probe([1], "float32").tolerance == PROBE_TOLERANCE[coarser]
    assert policy.probe([1], "bfloat16").tolerance == PROBE_TOLERANCE["bfloat16"]


def test_the_optimizer_s_state_moves_as_a_whole(policy):
    """The fused kernel reads step counts on the device of the moments."""
    optimizer = Adam(policy.model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    policy.forward([[1]], [[2, 3]], 1.0).logprobs.sum().backward()
    optimizer.update()
    optimizer.move(lambda tensor: tensor.to("meta"))
    moved = {value.device.type for state in optimizer.state.values() for value in state.values()}
    assert moved == {"meta"}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_probe_leaves_the_mode_of_every_part_as_it_was(policy, frozen):
    policy.model.train()
    policy.model.lm_head.train(not frozen)
    before = [module.training for module in policy.model.modules()]
    next_logprobs(policy.model, [1, 2])
    assert [module.training for module in policy.model.modules()] == before


ECHO = [Example(f"{c}\n", "k", {}) for c in "abcdefgh" * 20]  # one answer to all: learnt in a second


def exact(pairs: list[tuple[Example, str]]) -> list[float]:
    return [float(text == example.answer) for example, text in pairs]


def test_warm_up_stops_at_its_target(policy):
    data = warmup_data(PromptFile(source="p"), ECHO)
    report = warm_up(
        policy, data, exact, Warmup(reward=0.4, max_seconds=60),
        max_prompt_tokens=8, max_response_tokens=4, temperature=1.0, seed=0,
    )  # fmt: skip
    assert report.reached
    assert report.reward >= 0.4
    assert report.describe().startswith("tiny model, random init + ")
    assert "stopped by" not in report.describe()


def test_warm_up_stops_at_its_time(policy, monkeypatch):
    ticks = itertools.count(0.0, 0.03)
    monkeypatch.setattr(warmup.time, "monotonic", lambda: next(ticks))
    data = warmup_data(PromptFile(source="p"), ECHO)
    report = warm_up(
        policy, data, lambda pairs: [0.0] * len(pairs), Warmup(reward=0.4, max_seconds=0.05),
        max_prompt_tokens=8, max_response_tokens=4, temperature=1.0, seed=0,
    )  # fmt: skip
    assert not report.reached
    assert report.steps == 5
    assert "stopped by warmup.max_seconds" in report.describe()


def test_held_out_lines_are_not_learnt():
    data = warmup_data(PromptFile(source="p"), ECHO)
    assert len(data.held_out) == len(ECHO) // 5 < NUM_HELD_OUT
    assert data.pool + data.held_out == ECHO


def test_without_answers_there_is_nothing_to_warm_up_with():
    with pytest.raises(ConfigError, match=r"0 rows of the data have an `answer`"):
        warmup_data(PromptFile(source="p.jsonl"), [Example("q", None, {})] * 5)


def test_the_cache_is_keyed_by_what_matters_and_complete(tmp_path, monkeypatch):
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    files = tmp_path / "files"
    files.mkdir()
    (files / "p.jsonl").write_text("{}")
    made = []

    def warm(policy: Policy) -> WarmupReport:
        made.append(policy)
        return WarmupReport(5, 0.1, 0.3, 0.4, True)

    def ready(**changes):
        job = {"name": "j", "model": {"init": "tiny", "hidden_size": 32, "num_layers": 1},
               "data": {"source": "p.jsonl"}, "reward": {"http": "http://x"}, **changes}  # fmt: skip
        parsed = Job.model_validate_json(json.dumps(job))
        return prepare(parsed, parsed.model, files, warm)

    folder, report = ready()
    assert report == WarmupReport(5, 0.1, 0.3, 0.4, True)
    assert ready(name="other", algorithm={"learning_rate": 1.0}) == (folder, report)
    assert len(made) == 1
    Policy.load(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert ready(algorithm={"max_response_tokens": 9})[0] != folder
    (files / "p.jsonl").write_text("{}\n{}")
    assert ready()[0] != folder
    plain, none = ready(model={"init": "tiny", "hidden_size": 32, "num_layers": 1, "warmup": None})
    assert none is None
    assert len(made) == 3
    assert plain.is_dir()


def test_a_failed_warm_up_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    job = Job.model_validate_json(
        json.dumps({"name": "j", "model": {"init": "tiny"}, "data": {"source": "p"}, "reward": "r.py:f"})
    )

    def broken(policy: Policy) -> WarmupReport:
        raise ConfigError("no", "yes")

    with pytest.raises(ConfigError):
        prepare(job, job.model, tmp_path, broken)
    assert list((tmp_path / "cache" / "tiny").iterdir()) == []
