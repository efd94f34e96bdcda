"""The real engine with a tiny random Qwen3: numerics, versions, aborts, and how its child ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlboost_runtime.agent.engine_host import make_engine
from rlboost_runtime.engines.base import EngineDied, EngineSpec, LoadFailed, Request
from rlboost_runtime.engines.transformers.engine import TransformersEngine
from rlboost_runtime.protocol.messages import Sampling

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

NEAR_TIE = 1e-3
SHAPE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


def save(model, folder: Path) -> Path:
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    made = {}
    for version in (0, 1):
        torch.manual_seed(version)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)).eval()
        made[version] = (model, save(model, root / f"v{version}"))
    return made


def spec_for(folder: Path, **changes) -> EngineSpec:
    spec = EngineSpec(
        kind="transformers",
        sampling=Sampling(temperature=0.0),
        max_context_tokens=1024,
        max_running=16,
        dtype="float32",
        seed=1,
        threads=1,
        log=folder / "engine.log",
        side_file=folder / "tokens.txt",
    )
    return msgspec.structs.replace(spec, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def greedy_engine(tmp_path_factory):
    engine = make_engine(spec_for(tmp_path_factory.mktemp("greedy")))
    assert isinstance(engine, TransformersEngine)
    await engine.start(60)
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sampling_engine(tmp_path_factory):
    spec = spec_for(
        tmp_path_factory.mktemp("sampling"),
        sampling=Sampling(temperature=0.7, top_p=0.9, stop_token_ids=(7, 8, 9, 10, 11, 12)),
    )
    engine = make_engine(spec)
    await engine.start(60)
    yield engine
    await engine.stop()


async def collect(
    engine, num_ends: int, outputs=None
) -> dict[int, tuple[list[int], list[float], str, set[int]]]:
    """Read until `num_ends` requests are over: ids, logprobs, ending, versions by request."""
    got: dict[int, tuple[list[int], list[float], str, set[int]]] = {}
    ends = 0
    async with asyncio.timeout(60):
        async for out in outputs or engine.outputs():
            for request_id, start, end in out.slices():
                ids, logprobs, finished, versions = got.get(request_id, ([], [], "", set()))
                assert finished == ""
                ids, logprobs = ids + out.token_ids[start:end], logprobs + out.logprobs[start:end]
                got[request_id] = (ids, logprobs, "", versions | {out.policy_version})
            for ended in out.ended:
                ids, logprobs, finished, versions = got.get(ended.request_id, ([], [], "", set()))
                assert finished == ""
                got[ended.request_id] = (ids, logprobs, ended.reason, versions | {out.policy_version})
            ends += len(out.ended)
            if ends == num_ends:
                return got
    raise AssertionError("the engine stopped")


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 90, (n,), generator=generator).tolist()
    return [torch.randint(20, 258, (length,), generator=generator).tolist() for length in lengths]


def assert_greedy_under(model, prompt: list[int], ids: list[int], logprobs: list[float]) -> None:
    """Each token is the likeliest under a plain forward pass (or nearly ties), with its very logprob."""
    with torch.no_grad():
        expected_TV = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = expected_TV[torch.arange(len(ids)), torch.tensor(ids)]
    assert (chosen - torch.tensor(logprobs)).abs().max() < 1e-4
    assert (expected_TV.max(dim=-1).values - chosen).max() < NEAR_TIE


async def test_tokens_and_logprobs_equal_a_plain_forward_and_ignore_their_neighbours(greedy_engine, models):
    model, folder = models[0]
    await greedy_engine.load(0, folder)
    asked = prompts(40)  # more than slots, of all lengths: requests join and leave in between
    greedy_engine.submit([Request(i, p, 5 + 7 * (i % 9)) for i, p in enumerate(asked)])
    got = await collect(greedy_engine, 40)
    for i, prompt in enumerate(asked):
        ids, logprobs, finished, versions = got[i]
        assert (len(ids), finished, versions) == (5 + 7 * (i % 9), "length", {0})
        assert_greedy_under(model, prompt, ids, logprobs)


async def test_a_continued_response_equals_the_uninterrupted_one(greedy_engine, models):
    model, folder = models[0]
    await greedy_engine.load(0, folder)
    (prompt,) = prompts(1, seed=5)
    greedy_engine.submit([Request(1, prompt, 60)])
    whole, whole_logprobs, _, _ = (await collect(greedy_engine, 1))[1]
    for kept in (1, 23, 59):
        greedy_engine.submit([Request(100 + kept, prompt + whole[:kept], 60 - kept)])
        ids, logprobs, _, _ = (await collect(greedy_engine, 1))[100 + kept]
        assert_greedy_under(model, prompt, whole[:kept] + ids, whole_logprobs[:kept] + logprobs)
        same = next((k for k, (a, b) in enumerate(zip(ids, whole[kept:], strict=True)) if a != b), len(ids))
        if same < len(ids):  # only a near-tie may part them
            assert abs(logprobs[same] - whole_logprobs[kept + same]) < NEAR_TIE


async def test_long_prompts_are_prefilled_in_chunks(greedy_engine, models):
    model, folder = models[0]
    await greedy_engine.load(0, folder)
    generator = torch.Generator().manual_seed(3)
    asked = [torch.randint(20, 258, (n,), generator=generator).tolist() for n in (900, 513, 3, 512)]
    greedy_engine.submit([Request(i, p, 8) for i, p in enumerate(asked)])
    got = await collect(greedy_engine, 4)
    for i, prompt in enumerate(asked):
        assert_greedy_under(model, prompt, got[i][0], got[i][1])


async def test_no_cached_key_survives_a_load(greedy_engine, models):
    """The same prompt under a new version must look as if the old one had never been."""
    (prompt,) = prompts(1, seed=9)
    for version in (0, 1, 0):
        model, folder = models[version]
        await greedy_engine.load(version, folder)
        assert greedy_engine.version == version
        greedy_engine.submit([Request(version, prompt, 30)])
        ids, logprobs, _, versions = (await collect(greedy_engine, 1))[version]
        assert versions == {version}
        assert_greedy_under(model, prompt, ids, logprobs)


async def test_the_probe_equals_a_plain_greedy_loop(greedy_engine, models):
    for version in (0, 1):
        model, folder = models[version]
        await greedy_engine.load(version, folder)
        ids, logprobs = await greedy_engine.greedy([20, 30, 40], 12)
        assert len(ids) == 12
        assert_greedy_under(model, [20, 30, 40], ids, logprobs)


async def test_an_abort_ends_the_request_and_nothing_of_it_comes_later(greedy_engine, models):
    _, folder = models[0]
    await greedy_engine.load(0, folder)
    outputs = greedy_engine.outputs()
    greedy_engine.submit([Request(i, [20 + i], 900) for i in range(18)])  # two of them wait for a slot
    num_seen = 0
    while num_seen < 64:
        num_seen += len((await anext(outputs)).request_ids)
    await greedy_engine.abort([0, 1, 17, 999])
    ended = {end.request_id: end.reason for out in greedy_engine._outputs for end in out.ended}
    assert ended == {0: "aborted", 1: "aborted", 17: "aborted"}
    greedy_engine._outputs.clear()
    later = {request_id for _ in range(20) for request_id in (await anext(outputs)).request_ids}
    assert not {0, 1, 17} & later
    assert 16 in later  # it got a free slot
    await greedy_engine.abort(list(range(18)))
    await outputs.aclose()
    greedy_engine._outputs.clear()
    assert greedy_engine.progress().running == greedy_engine.progress().waiting == 0


async def test_refused_requests_come_back_failed_and_harm_nobody(greedy_engine, models):
    _, folder = models[0]
    await greedy_engine.load(0, folder)
    bad = [[], [258], [-1], [20] * 1020]
    greedy_engine.submit([Request(i, ids, 5) for i, ids in enumerate(bad)] + [Request(9, [20], 5)])
    got = await collect(greedy_engine, 5)
    assert {i: got[i][2] for i in got} == {0: "failed", 1: "failed", 2: "failed", 3: "failed", 9: "length"}


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "garbage"])
async def test_a_bad_version_is_refused_and_then_nothing_is_served(greedy_engine, models, tmp_path, damage):
    model, folder = models[0]
    await greedy_engine.load(0, folder)
    tensors = load_file(folder / "model.safetensors")
    bad = save(models[1][0], tmp_path / "bad")
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "extra":
        tensors["model.extra.weight"] = torch.zeros(3)
    elif damage == "shape":
        tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, bad / "model.safetensors")
    if damage == "garbage":
        (bad / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(LoadFailed):
        await greedy_engine.load(5, bad)
    assert greedy_engine.version is None
    greedy_engine.submit([Request(1, [20], 5)])
    assert (await collect(greedy_engine, 1))[1][2] == "failed"
    await greedy_engine.load(0, folder)  # and it recovers
    ids, logprobs = await greedy_engine.greedy([20], 5)
    assert_greedy_under(model, [20], ids, logprobs)


async def test_an_untied_model_of_another_family_replaces_the_first(greedy_engine, models, tmp_path):
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)).eval()
    await greedy_engine.load(0, models[0][1])
    await greedy_engine.load(1, save(model, tmp_path / "qwen2"))
    greedy_engine.submit([Request(0, [30, 40], 20)])
    ids, logprobs, _, _ = (await collect(greedy_engine, 1))[0]
    assert_greedy_under(model, [30, 40], ids, logprobs)


async def test_sleep_gives_memory_back_and_a_load_after_waking_serves(greedy_engine, models, tmp_path):
    torch.manual_seed(6)
    shape = SHAPE | {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
    big = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16, tie_word_embeddings=True)).eval()
    num_bytes = 4 * sum(p.numel() for p in big.parameters())
    await greedy_engine.load(3, save(big, tmp_path / "big"))
    await greedy_engine.greedy([20], 1)
    child = psutil.Process(greedy_engine.pid)
    awake = child.memory_info().rss
    await greedy_engine.sleep()
    assert greedy_engine.version is None
    assert awake - child.memory_info().rss > 0.8 * num_bytes
    with pytest.raises(LoadFailed):
        await greedy_engine.load(0, models[0][1])
    await greedy_engine.wake()
    await greedy_engine.load(0, models[0][1])
    ids, logprobs = await greedy_engine.greedy([20], 5)
    assert_greedy_under(models[0][0], [20], ids, logprobs)


async def test_the_side_file_counts_every_token(greedy_engine, models):
    side_file = greedy_engine._spec.side_file
    await greedy_engine.load(0, models[0][1])
    before = len(side_file.read_text().splitlines())
    greedy_engine.submit([Request(77, [20], 11), Request(78, [21], 4)])
    await collect(greedy_engine, 2)
    lines = side_file.read_text().splitlines()[before:]
    assert [sum(line.startswith(f"{i} 1 ") for line in lines) for i in (77, 78)] == [11, 4]
    assert int(lines[-1].split()[2]) == before + 15


async def test_sampled_logprobs_are_of_the_distribution_sampled_from(sampling_engine, models):
    model, folder = models[0]
    await sampling_engine.load(0, folder)
    asked = prompts(12, seed=2)
    sampling_engine.submit([Request(i, p, 60) for i, p in enumerate(asked)])
    got = await collect(sampling_engine, 12)
    stops = 0
    for i, prompt in enumerate(asked):
        ids, logprobs, finished, _ = got[i]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        for k, token in enumerate(ids):
            probs, order = logits[k].softmax(-1).sort(descending=True)
            kept = order[: int((probs.cumsum(0) < 0.9).sum()) + 1]
            nucleus = torch.full_like(logits[k], -torch.inf)
            nucleus[kept] = logits[k][kept]
            assert abs(float(nucleus.log_softmax(-1)[token]) - logprobs[k]) < 1e-4
        ends_at_stop = ids[-1] in (7, 8, 9, 10, 11, 12)
        assert finished == ("stop" if ends_at_stop else "length")
        assert not set(ids[:-1]) & {7, 8, 9, 10, 11, 12}
        stops += finished == "stop"
    assert stops > 0


async def test_pacing_holds_the_rate(models, tmp_path):
    engine = make_engine(spec_for(tmp_path, tokens_per_s_per_response=50.0))
    await engine.start(60)
    try:
        await engine.load(0, models[0][1])
        began = time.monotonic()
        engine.submit([Request(i, [20 + i], 25) for i in range(4)])
        await collect(engine, 4)
        assert 0.45 <= time.monotonic() - began < 3.0
    finally:
        await engine.stop()


async def test_nobody_reading_holds_the_child_and_reading_goes_on(greedy_engine, models, monkeypatch):
    monkeypatch.setattr("rlboost_runtime.engines.transformers.engine.MAX_UNREAD_STEPS", 10)
    await greedy_engine.load(0, models[0][1])
    greedy_engine.submit([Request(0, [20], 300)])
    await asyncio.sleep(0.4)
    unread = len(greedy_engine._outputs)
    await asyncio.sleep(0.3)
    assert unread == len(greedy_engine._outputs) < 200
    assert len((await collect(greedy_engine, 1))[0][0]) == 300


async def test_a_killed_child_is_reported_once_and_everywhere(models, tmp_path):
    engine = make_engine(spec_for(tmp_path))
    await engine.start(60)
    await engine.load(0, models[0][1])
    engine.submit([Request(0, [20], 900)])
    outputs = engine.outputs()
    await anext(outputs)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        async for _ in outputs:
            pass
    assert engine.version is None
    with pytest.raises(EngineDied):
        await engine.abort([0])
    await engine.stop()


PARENT = """
import asyncio, sys
from pathlib import Path
from rlboost_runtime.engines.base import EngineSpec, Request
from rlboost_runtime.agent.engine_host import make_engine
from rlboost_runtime.protocol.messages import Sampling

async def main():
    folder = Path(sys.argv[1])
    spec = EngineSpec("transformers", Sampling(), 1024, 4, "float32", 1, log=folder / "engine.log")
    engine = make_engine(spec)
    await engine.start(60)
    await engine.load(0, Path(sys.argv[2]))
    engine.submit([Request(0, [20], 1000)])
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_child_dies_with_a_killed_agent(models, tmp_path):
    weights = str(models[0][1])
    parent = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs here
        [sys.executable, "-c", PARENT, str(tmp_path), weights], stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert os.getsid(child.pid) == child.pid  # a session of its own
        assert child.nice() >= psutil.Process(parent.pid).nice() + 5
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    psutil.wait_procs([child], timeout=2)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE  # dead, whoever reaps it


async def test_a_response_ends_at_the_stop_token_of_the_models_own_configuration(
    greedy_engine, models, tmp_path
):
    model, folder = models[0]
    prompt = prompts(1, seed=5)[0]
    await greedy_engine.load(70, folder)
    greedy_engine.submit([Request(7001, prompt, 8)])
    free, _, finished, _ = (await collect(greedy_engine, 1))[7001]
    assert (finished, len(free)) == ("length", 8)
    stop = free[4]
    with_stop = save(model, tmp_path / "with_stop")
    (with_stop / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 3]}))
    await greedy_engine.load(71, with_stop)
    greedy_engine.submit([Request(7002, prompt, 8)])
    ids, _, finished, _ = (await collect(greedy_engine, 1))[7002]
    assert finished == "stop"
    assert ids == free[: free.index(stop) + 1]


async def test_an_engine_left_to_choose_reports_what_it_chose(models, tmp_path):
    engine = make_engine(spec_for(tmp_path, max_running=None))
    await engine.start(60)
    try:
        await engine.load(0, models[0][1])
        assert engine.kv_cache is not None
        assert engine.kv_cache.max_running == 16, "of so small a model a CPU holds its upper bound"
        assert engine.kv_cache.capacity_tokens == 16 * 1024
    finally:
        await engine.stop()
