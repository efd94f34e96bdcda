"""Adapter-only versions: a name for each, requests stay with theirs, unused ones are unloaded."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from rlboost_runtime.engines.base import LoadFailed, Request
from rlboost_runtime.trainer.artifacts.publisher import Publisher
from rlboost_runtime.weights.manifest import probe_matches, read_manifest
from rlboost_runtime.weights.store import part_folder
from tests.integration.engines.adapter_rig import Trained
from tests.vllm.vllm_rig import MARKS, assert_under, logprobs_under, prompts

pytestmark = MARKS

RANK, ALPHA = 4, 16
TARGETS = ("q_proj", "v_proj")


def write_adapter(model, folder, base, seed: int):
    """Write a random adapter in PEFT's layout; return the model with it merged in."""
    folder.mkdir()
    merged = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] not in TARGETS:
            continue
        out_features, in_features = module.weight.shape
        a = torch.randn(RANK, in_features, generator=generator) * 0.1
        b = torch.randn(out_features, RANK, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        module.weight.data += ALPHA / RANK * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
        "base_model_name_or_path": f"../{base.name}",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


async def adapters(engine) -> set[str]:
    listed = await engine.server.api.get("/v1/models")
    return {model["id"] for model in listed["data"]} - {"policy"}


async def test_adapters_follow_one_another_and_requests_stay_with_theirs(engine, reader, qwen):
    base = qwen.folder(0)
    await engine.load(0, base)
    first = write_adapter(qwen[0], qwen.root / "v000041", base, seed=1)
    second = write_adapter(qwen[0], qwen.root / "v000042", base, seed=2)
    prompt, other = prompts(2, seed=31)
    assert (logprobs_under(first, prompt, [1]) - logprobs_under(second, prompt, [1])).abs().max() > 0.1

    times = await engine.load(41, qwen.root / "v000041")
    assert times.pause_s == 0.0  # nothing waits
    assert engine.version == 41
    engine.submit([Request(1, prompt, 500)])
    await reader.until(lambda: 1 in reader.responses)
    await engine.load(42, qwen.root / "v000042")
    assert await adapters(engine) == {"policy-v41", "policy-v42"}
    engine.submit([Request(2, other, 30)])
    (new,) = await reader.ends([2])
    assert set(new.versions) == {42}
    assert_under(second, other, new)
    (old,) = await reader.ends([1])
    assert set(old.versions) == {41}
    assert_under(first, prompt, old)
    for _ in range(50):
        if await adapters(engine) == {"policy-v42"}:
            break
        await reader.until(lambda: True)
    else:
        raise AssertionError("the former adapter stays loaded")

    ids, logprobs = await engine.greedy(prompt, 8)
    expected = logprobs_under(second, prompt, ids)
    assert (expected.max(-1).values - torch.tensor(logprobs)).abs().max() < 1e-4

    await engine.load(0, base)
    assert await adapters(engine) == set()
    engine.submit([Request(3, prompt, 10)])
    assert_under(qwen[0], prompt, (await reader.ends([3]))[0])


async def test_what_a_trainer_publishes_as_adapters_is_what_the_engine_computes(
    engine, reader, qwen, tmp_path, monkeypatch
):
    monkeypatch.setattr(part_folder, "LEAST_LINKED_BYTES", 10_000)
    await engine.load(0, qwen.folder(0))
    trained = Trained(tmp_path, copy.deepcopy(qwen[0]))
    model, (prompt,) = trained.policy.model, prompts(1, seed=32)
    with trained.serving(), Publisher(trained.store, "float32", lambda _: None) as publisher:
        for version, how in ((51, "full"), (52, "part")):
            trained.train(version)
            trained.publish(publisher, version)
            pulled = await asyncio.to_thread(trained.pull, version)
            assert pulled.how == how
            assert (await engine.load(version, pulled.path)).pause_s == 0.0
            engine.submit([Request(version, prompt, 12)])
            (response,) = await reader.ends([version])
            assert set(response.versions) == {version}
            assert_under(model, prompt, response)
            frozen = logprobs_under(qwen[0], prompt, response.ids)
            assert (frozen - logprobs_under(model, prompt, response.ids)).abs().max() > 0.1
            manifest = read_manifest(pulled.path)
            probe = manifest.probe
            ids, logprobs = await engine.greedy(list(probe.token_ids), len(probe.next_token_ids))
            assert probe_matches(manifest, ids, logprobs) is None
    await engine.load(0, qwen.folder(0))


async def test_an_adapter_that_cannot_be_loaded_is_refused(engine, reader, qwen):
    await engine.load(0, qwen.folder(0))
    broken = qwen.root / "v000043"
    write_adapter(qwen[0], broken, qwen.folder(0), seed=3)
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 50)
    with pytest.raises(LoadFailed):
        await engine.load(43, broken)
    assert engine.version is None
    await engine.load(0, qwen.folder(0))
    engine.submit([Request(1, [9], 5)])
    assert_under(qwen[0], [9], (await reader.ends([1]))[0])
