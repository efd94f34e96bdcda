"""The production engine on one real server: numerics, endings, aborts, caches."""

from __future__ import annotations

import asyncio
import re

import psutil
import pytest
import torch

from rlboost_runtime.engines.base import Request
from rlboost_runtime.engines.vllm import api
from rlboost_runtime.engines.vllm.api import ApiError, TokenApi
from rlboost_runtime.engines.vllm.command import CPU_BLOCK_TOKENS
from tests.vllm.vllm_rig import MARKS, VOCABULARY, assert_under, counter, logprobs_under, prompts

pytestmark = MARKS


@pytest.mark.parametrize("dialect", list(TokenApi))
async def test_tokens_and_logprobs_equal_the_trainers_forward_pass(
    engine, reader, qwen, dialect, monkeypatch
):
    assert engine.streams.dialect is TokenApi.GENERATE  # found by asking
    monkeypatch.setattr(engine.streams, "dialect", dialect)
    asked = prompts(40)
    engine.submit([Request(i, p, 5 + 3 * (i % 9), priority=-i) for i, p in enumerate(asked)])
    for i, response in enumerate(await reader.ends(range(40))):
        assert (response.problem, response.finished, len(response.ids)) == ("", "length", 5 + 3 * (i % 9))
        assert set(response.versions) == {0}
        assert_under(qwen[0], asked[i], response)


async def test_logprobs_are_of_the_distribution_that_was_sampled_from(engine, reader, qwen, monkeypatch):
    """Trap 9: vLLM's default are logprobs before temperature and top-p."""
    monkeypatch.setattr(engine.streams, "sampling", replace_sampling(engine, temperature=0.7, top_p=0.9))
    asked = prompts(8, seed=2)
    engine.submit([Request(i, p, 40) for i, p in enumerate(asked)])
    for prompt, response in zip(asked, await reader.ends(range(8)), strict=True):
        logits = logprobs_under(qwen[0], prompt, response.ids) / 0.7
        for k, token in enumerate(response.ids):
            probs, order = logits[k].softmax(-1).sort(descending=True)
            kept = order[: int((probs.cumsum(0) < 0.9).sum()) + 1]
            nucleus = torch.full_like(logits[k], -torch.inf)
            nucleus[kept] = logits[k][kept]
            assert abs(float(nucleus.log_softmax(-1)[token]) - response.logprobs[k]) < 1e-4


def replace_sampling(engine, **changes):
    import msgspec

    return msgspec.structs.replace(engine.streams.sampling, **changes)


async def test_a_chunk_of_several_tokens_is_taken_whole(engine, reader, qwen, monkeypatch):
    """Trap 6: an API server that lags behind its core merges tokens; all of them must be there, in order."""
    (prompt,) = prompts(1, seed=3)
    chunks = []
    original = engine.streams.take_chunk

    def watched(stream, chunk):
        chunks.append(len(chunk.token_ids))
        original(stream, chunk)

    monkeypatch.setattr(engine.streams, "take_chunk", watched)
    front = psutil.Process(engine.server.pid).children()[0]
    engine.submit([Request(1, prompt, 400), Request(2, prompt, 400)])
    await reader.until(lambda: 1 in reader.responses)
    front.suspend()
    await asyncio.sleep(0.5)
    front.resume()
    a, b = await reader.ends([1, 2])
    assert max(chunks) > 1
    assert a.ids == b.ids
    assert_under(qwen[0], prompt, a)
    assert len(a.ids) == len(b.logprobs) == 400


async def test_a_response_at_its_limit_is_finished_without_asking_the_engine(engine, reader, qwen):
    """Trap 7: vLLM answers 400 to max_tokens 0."""
    engine.submit([Request(1, [5, 6], 0)])
    (response,) = await reader.ends([1])
    assert (response.finished, response.ids) == ("length", [])
    with pytest.raises(ApiError):  # what would have become of it
        await engine.server.api.post(
            TokenApi.GENERATE, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 0}, "model": "policy"}
        )


async def test_a_stop_token_ends_a_response_and_is_part_of_it(engine, reader, qwen, monkeypatch):
    (prompt,) = prompts(1, seed=5)
    engine.submit([Request(1, prompt, 8)])
    (free,) = await reader.ends([1])
    stop = free.ids[4]
    monkeypatch.setattr(engine.streams, "sampling", replace_sampling(engine, stop_token_ids=(stop,)))
    engine.submit([Request(2, prompt, 8)])
    (response,) = await reader.ends([2])
    assert response.finished == "stop"
    assert response.ids == free.ids[: free.ids.index(stop) + 1]


async def test_refused_requests_come_back_failed_and_harm_nobody(engine, reader, qwen):
    bad = [[], [VOCABULARY], [5] * 1020]
    engine.submit([Request(i, ids, 8) for i, ids in enumerate(bad)] + [Request(9, [5], 8)])
    responses = await reader.ends([0, 1, 2, 9])
    assert [r.finished for r in responses] == ["failed", "failed", "failed", "length"]
    assert all(r.problem for r in responses[:3])


async def test_an_abort_frees_the_engine_and_nothing_comes_later(engine, reader, qwen):
    """Trap 5: the abort interface answers 200 to ids that the engine does not know."""
    engine.submit([Request(i, [5 + i], 900) for i in range(4)])
    await reader.until(lambda: all(len(reader.responses.get(i, none).ids) >= 10 for i in range(4)))
    hung_up = []
    tasks = [engine.streams._open[i].task for i in (0, 1)]
    original = engine.streams._send_abort

    async def watched(engine_ids):
        await original(engine_ids)
        await asyncio.wait(tasks, timeout=3)
        hung_up.extend(task for task in tasks if not task.done())

    engine.streams._send_abort = watched
    await engine.abort([0, 1, 999])
    engine.streams._send_abort = original
    assert hung_up == []  # the engine itself ended them, under its own ids
    await asyncio.sleep(0)
    first = {i: (reader.responses[i].finished, len(reader.responses[i].ids)) for i in (0, 1)}
    assert {finished for finished, _ in first.values()} == {"aborted"}
    rest = await reader.ends([2, 3])
    assert [r.finished for r in rest] == ["length", "length"]
    assert first == {i: (reader.responses[i].finished, len(reader.responses[i].ids)) for i in (0, 1)}


async def test_the_cache_and_the_queue_are_the_servers_own(engine, reader, qwen):
    """64 MiB hold 64 Ki tokens of 2 layers x 2 (key, value) x 2 heads x 32 x 4 bytes."""
    assert engine.kv_cache.capacity_tokens == pytest.approx(65_536, rel=0.01)
    assert engine.kv_cache.block_tokens == CPU_BLOCK_TOKENS
    engine.submit([Request(i, [5 + i], 900) for i in range(64 + 7)])
    assert engine.progress().waiting == 64 + 7, "nothing is known yet"
    await reader.until(lambda: (engine.progress().running, engine.progress().waiting) == (64, 7))
    await reader.until(lambda: engine.progress().kv_free_tokens < 65_536 - 64 * CPU_BLOCK_TOKENS)
    await engine.abort(range(64))
    await reader.until(lambda: engine.progress().waiting == 0)
    await engine.abort(range(64, 64 + 7))
    async with asyncio.timeout(30):
        while engine.progress().kv_free_tokens < 0.98 * 65_536:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.1)
    assert (engine.progress().running, engine.progress().preempted) == (0, 0)


class none:
    ids: tuple[int, ...] = ()


async def test_an_abort_before_the_first_token_works_too(engine, reader, qwen):
    engine.submit([Request(1, [7], 900)])
    await engine.abort([1])
    (response,) = await reader.ends([1])
    assert response.finished == "aborted"
    for _ in range(100):
        if re.search(
            r"^vllm:num_requests_running{[^}]*} 0.0$", await engine.server.api.text("/metrics"), re.M
        ):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the engine still runs what was aborted")


async def test_a_stream_without_its_end_is_kept_and_released(engine, reader, qwen, monkeypatch):
    """An error line inside an HTTP 200, a missing finish: alike, what came is kept."""
    original = api._lines

    async def cut(content):
        number = 0
        async for line in original(content):
            if number == 5:
                if cut.error:
                    yield b'{"error":{"message":"boom","code":500}}'
                return
            number += 1
            yield line

    monkeypatch.setattr(api, "_lines", cut)
    for number, cut.error in ((1, True), (2, False)):
        (prompt,) = prompts(1, seed=number)
        engine.submit([Request(number, prompt, 200)])
        (response,) = await reader.ends([number])
        assert response.finished == "failed"
        assert ("boom" in response.problem) is cut.error
        assert 5 <= len(response.ids) < 200
        assert_under(qwen[0], prompt, response)
    assert engine.version == 0  # the server lives: nobody else was harmed


@pytest.mark.parametrize("first_alone", [True, False])
async def test_siblings_find_the_prompts_blocks_in_the_cache(engine, reader, qwen, first_alone):
    """Group of n: at least (n-1)/n of the prompt blocks are cache hits.

    Nobody has to wait for the first one's prefill: vLLM books blocks as cached when it schedules them, so
    siblings that come together share them too.
    """
    n, blocks = 8, 12
    generator = torch.Generator().manual_seed(77 + first_alone)
    prompt = torch.randint(5, VOCABULARY, (blocks * CPU_BLOCK_TOKENS + 5,), generator=generator).tolist()
    queried, hit = await counter(engine, "prefix_cache_queries"), await counter(engine, "prefix_cache_hits")
    engine.submit([Request(0, prompt, 8)])
    if first_alone:
        await reader.until(lambda: 0 in reader.responses)
    engine.submit([Request(i, prompt, 8) for i in range(1, n)])
    responses = await reader.ends(range(n))
    hits = await counter(engine, "prefix_cache_hits") - hit
    queries = await counter(engine, "prefix_cache_queries") - queried
    assert queries == n * len(prompt)
    assert hits >= (n - 1) * blocks * CPU_BLOCK_TOKENS
    for response in responses:
        assert_under(qwen[0], prompt, response)


async def test_no_cached_block_crosses_from_one_version_to_another(engine, reader, qwen):
    """The salt alone keeps them apart: here the cache is not even reset."""
    prompt = prompts(1, seed=8, longest=200)[0] * 3
    engine.submit([Request(0, prompt, 4)])
    await reader.ends([0])
    hit = await counter(engine, "prefix_cache_hits")
    engine.streams.label = 99  # as if a swap had just taken place
    engine.submit([Request(1, prompt, 4)])
    engine.streams.label = 0
    await reader.ends([1])
    assert await counter(engine, "prefix_cache_hits") == hit
    engine.submit([Request(2, prompt, 4)])
    await reader.ends([2])
    assert await counter(engine, "prefix_cache_hits") > hit


async def test_the_probe_is_greedy_and_true(engine, qwen):
    for version in (1, 0):
        await engine.load(version, qwen.folder(version))
        ids, logprobs = await engine.greedy([20, 30, 40], 12)
        expected = logprobs_under(qwen[version], [20, 30, 40], ids)
        assert ids == expected.argmax(-1).tolist()
        assert (expected.max(-1).values - torch.tensor(logprobs)).abs().max() < 1e-4


async def test_a_start_is_timed_by_phase(engine):
    assert engine.server is not None
    phases = engine.server.phases_s
    assert {"imports", "load", "init"} <= phases.keys()
    assert all(seconds >= 0 for seconds in phases.values())


async def test_every_process_of_a_server_is_found_by_its_environment(engine):
    """A machine's processes are ended by the tags in it, and vLLM's title of a process is written over it."""
    keeper = psutil.Process(engine.server.pid)
    server = keeper.children(recursive=True)
    assert len(server) >= 2
    for process in server:
        assert process.environ().get("VLLM_SERVER_DEV_MODE") == "1", process.cmdline()


async def test_sleep_on_a_cpu_is_neither_asked_for_nor_believed(engine, reader, qwen, monkeypatch):
    """Trap 8: vLLM answers 200 there and frees nothing. The version has to be proved anew all the same."""
    asked = []
    post = engine.server.api.post
    monkeypatch.setattr(
        engine.server.api,
        "post",
        lambda path, *rest, **more: (asked.append(path), post(path, *rest, **more))[1],
    )
    await engine.sleep()
    assert engine.version is None
    engine.submit([Request(1, [5], 4)])
    assert (await reader.ends([1]))[0].finished == "failed"
    await engine.wake()
    assert engine.version is None
    assert asked == []
    await engine.load(0, qwen.folder(0))
    engine.submit([Request(2, [5], 4)])
    assert_under(qwen[0], [5], (await reader.ends([2]))[0])
