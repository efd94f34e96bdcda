"""Weights in place: ten swaps under load on tied and untied models of two families, and what may go wrong."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from rlboost_runtime.engines.base import LoadFailed, Request
from tests.vllm.vllm_rig import (
    HALVES,
    LLAMA,
    LLAMA_TIED,
    MAIN,
    MARKS,
    QWEN,
    Reader,
    assert_under,
    prompts,
    save,
    tiny,
)

pytestmark = MARKS

SWAPS = 10
STREAMS = 8
LENGTH = 600
ENDLESS = 900
"""As many as fit beside the longest prompt."""
STEPS_PER_S = 30.0


@pytest.mark.parametrize("server", [MAIN, LLAMA_TIED, QWEN, LLAMA], indirect=True)
async def test_ten_swaps_under_load(server):
    """Traps 1, 2 and 4. No request is lost, and after each swap logits are those of the new weights."""
    async with Reader.of(server.engine) as reader:
        asked = await swap_under_load(server.engine, reader, server.versions, SWAPS, LENGTH)
        responses = await reader.ends(asked)
        assert {(r.finished, len(r.ids)) for r in responses} == {("length", LENGTH)}
        check_all(server.versions, asked, responses, SWAPS)


@pytest.mark.parametrize("server", [HALVES], indirect=True)
async def test_an_engine_over_two_devices_takes_versions_as_one_does(server):
    """Each of its workers loads its own half; on CPUs they are two processes."""
    assert server.engine.server.has_flag("--tensor-parallel-size")
    tokens = server.engine.kv_cache.capacity_tokens
    assert tokens == pytest.approx(2 * 65_536, rel=0.01), "each keeps half of every token's cache"
    pace = str(STEPS_PER_S)  # else all tokens may be there before the first swap
    await server.engine.server.api.rpc("rlboost_pace", steps_per_s=pace)
    async with Reader.of(server.engine) as reader:
        swaps = 2
        asked = await swap_under_load(server.engine, reader, server.versions, swaps, ENDLESS)
        await server.engine.abort(list(asked))  # on shared cores they may take minutes, or seconds
        responses = await reader.ends(asked)
        assert {response.finished for response in responses} <= {"aborted", "length"}
        check_all(server.versions, asked, responses, swaps)


async def swap_under_load(engine, reader, versions, swaps: int, length: int) -> dict[int, list[int]]:
    """Swap while responses of `length` tokens are generated; return their prompts by number.

    On quick cores they end before the last swap: others take their place.
    """
    asked: dict[int, list[int]] = {}
    number = 1000
    for k in range(1, swaps + 1):
        if sum(i in asked for i in engine.streams.open) < STREAMS // 2:
            more = dict(enumerate(prompts(STREAMS, seed=10 + k), len(asked)))
            engine.submit([Request(i, p, length) for i, p in more.items()])
            asked |= more
            await reader.until(lambda more=more: reader.responses.keys() >= more.keys())
        version, source = 10 + k, k % 2
        versions.models[version] = versions[source]
        before = longest(reader)
        await reader.until(lambda before=before: longest(reader) >= min(before + 5, length))
        times = await engine.load(version, versions.folder(source))
        assert engine.version == version
        assert 0 < times.pause_s <= times.load_s
        fresh = prompts(1, seed=100 + k)[0]
        engine.submit([Request(number + k, fresh, 6)])
        (response,) = await reader.ends([number + k])
        assert set(response.versions) == {version}
        assert_under(versions[source], fresh, response)
    return asked


def check_all(versions, asked, responses, swaps: int) -> None:
    """Every version generated a part of them, and every token is the one that its version gives."""
    assert {response.versions[0] for response in responses[:STREAMS]} == {0}
    for prompt, response in zip(asked.values(), responses, strict=True):
        assert response.versions == sorted(response.versions)
        check_each_version(versions, prompt, response)
    assert {v for r in responses for v in r.versions} >= set(range(11, 11 + swaps - 1))


def longest(reader) -> int:
    return max((len(response.ids) for response in reader.responses.values()), default=0)


def check_each_version(versions, prompt, response) -> None:
    """Every token has the logprob that the version it is labelled with gives it, over the whole prefix."""
    for version in set(response.versions):
        source = version if version == 0 else (version - 10) % 2
        first = response.versions.index(version)
        last = first + response.versions.count(version)
        part = type(response)(response.ids[first:last], response.logprobs[first:last])
        assert_under(versions[source], prompt + response.ids[:first], part)


async def test_reload_weights_is_the_fallback_and_right_too(engine, reader, qwen, monkeypatch):
    """Servers without the transfer interface; trap 1 again, for this path."""
    monkeypatch.setattr(engine._serving.swapper, "has_transfer", False)
    engine.submit([Request(1, [9, 8, 7], 400)])
    for version, source in ((31, 1), (32, 0)):
        await engine.load(version, qwen.folder(source))
        engine.submit([Request(version, [4, 5, 6], 12)])
        (response,) = await reader.ends([version])
        assert set(response.versions) == {version}
        assert_under(qwen[source], [4, 5, 6], response)
    (running,) = await reader.ends([1])
    assert running.finished == "length"


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "dtype", "garbage", "truncated"])
async def test_a_bad_version_is_refused_before_anything_is_touched(engine, reader, qwen, tmp_path, damage):
    """Trap 3: what vLLM loads half it serves without a word. Nothing is served until a good load."""
    await engine.load(0, qwen.folder(0))
    tensors = load_file(qwen.folder(1) / "model.safetensors")
    bad = save(tiny("qwen3", tied=True, seed=1), tmp_path / "bad")
    name = "model.layers.1.mlp.down_proj.weight"
    match damage:
        case "missing":
            del tensors[name]
        case "extra":
            tensors["model.extra.weight"] = tensors[name].clone()
        case "shape":
            tensors[name] = tensors[name][:, :7].clone()
        case "dtype":
            tensors[name] = tensors[name].half()
    file = bad / "model.safetensors"
    save_file(tensors, file)
    if damage == "garbage":
        file.write_bytes(b"\0" * 100)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LoadFailed):
        await engine.load(5, bad)
    assert engine.version is None
    engine.submit([Request(1, [20], 5)])
    assert (await reader.ends([1]))[0].finished == "failed"
    await engine.load(0, qwen.folder(0))
    engine.submit([Request(2, [20], 5)])
    assert_under(qwen[0], [20], (await reader.ends([2]))[0])
