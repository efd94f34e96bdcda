"""How a server dies, and that no token, no response and no process is left behind."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest
from safetensors.torch import load_file, save_file

from rlboost_runtime.engines.base import EngineDied, Request
from tests.vllm.vllm_rig import (
    DRAFTING,
    LLAMA,
    LLAMA_TIED,
    MAIN,
    MARKS,
    QWEN,
    SECOND,
    Reader,
    assert_under,
    prompts,
    save,
    tiny,
)

pytestmark = MARKS

STREAMS = 32
LENGTH = 300


def killing(name: str) -> pytest.MarkDecorator:
    """The server that a test may kill."""
    return pytest.mark.parametrize("server", [name], indirect=True)


def family(engine) -> list[psutil.Process]:
    """The processes of an engine's server, its keeper first."""
    keeper = psutil.Process(engine.server.pid)
    return [keeper, *keeper.children(recursive=True)]


def front_of(engine) -> psutil.Process:
    """The API server."""
    return family(engine)[1]


def core_of(engine) -> psutil.Process:
    """The process that computes: the largest of those below the API server."""
    return max(front_of(engine).children(recursive=True), key=lambda p: p.memory_info().rss)


async def assert_gone(processes) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


async def under_way(engine, n: int, at_least: int) -> tuple[Reader, list[list[int]]]:
    """Start `n` streams and wait until each has some tokens."""
    reader = Reader(engine)
    asked = prompts(n, seed=21)
    engine.submit([Request(i, p, LENGTH) for i, p in enumerate(asked)])
    await reader.until(
        lambda: all(i in reader.responses and len(reader.responses[i].ids) >= at_least for i in range(n))
    )
    return reader, asked


@killing(SECOND)
async def test_32_streams_of_a_killed_server_continue_on_another(server, engine, reader, qwen):
    victim = server.engine
    asked = prompts(STREAMS, seed=21)
    engine.submit([Request(1000 + i, p, LENGTH) for i, p in enumerate(asked)])
    whole = await reader.ends([1000 + i for i in range(STREAMS)])

    dying, _ = await under_way(victim, STREAMS, at_least=20)
    processes = family(victim)
    os.killpg(victim.server.pid, signal.SIGKILL)
    await dying.until(lambda: dying.died is not None, timeout_s=60)
    assert isinstance(dying.died, EngineDied)
    assert victim.version is None
    kept = [dying.responses[i] for i in range(STREAMS)]
    assert all(20 <= len(r.ids) < LENGTH and r.finished == "" for r in kept)
    rest = [Request(i, asked[i] + kept[i].ids, LENGTH - len(kept[i].ids)) for i in range(STREAMS)]
    engine.submit(rest)
    for i, response in enumerate(await reader.ends(range(STREAMS))):
        response.ids[:0], response.logprobs[:0] = kept[i].ids, kept[i].logprobs
        assert response.ids == whole[i].ids
        assert_under(qwen[0], asked[i], response)
    await dying.close()
    await assert_gone(processes)


@killing(LLAMA_TIED)
async def test_no_engine_core_outlives_its_api_server(server):
    """vLLM leaves the core behind as an orphan, with the GPU's memory."""
    victim = server.engine
    processes = family(victim)
    assert len(processes) >= 3
    reader, _ = await under_way(victim, 2, at_least=5)
    front_of(victim).kill()
    await reader.until(lambda: reader.died is not None, timeout_s=60)
    await reader.close()
    await assert_gone(processes)


@killing(LLAMA)
async def test_an_error_inside_an_http_200_ends_the_engine_but_loses_no_token(server):
    victim = server.engine
    processes = family(victim)
    reader, asked = await under_way(victim, 4, at_least=10)
    core_of(victim).kill()
    await reader.until(lambda: reader.died is not None, timeout_s=60)
    assert isinstance(reader.died, EngineDied)
    for i, prompt in enumerate(asked):
        assert reader.responses[i].finished == ""  # given back by the agent, not failed by the engine
        assert_under(server.versions[0], prompt, reader.responses[i])
    await reader.close()
    await assert_gone(processes)


@killing(DRAFTING)
async def test_a_server_does_not_outlive_its_agent(server):
    """The keeper sees its standard input end, as it does when the agent is killed."""
    victim = server.engine
    processes = family(victim)
    assert os.getsid(processes[0].pid) == processes[0].pid  # a session of its own
    assert {os.getpgid(p.pid) for p in processes} == {processes[0].pid}
    victim.server._process.stdin.close()
    await assert_gone(processes)


@killing(QWEN)
async def test_sigterm_loses_no_token_that_came(server):
    victim = server.engine
    reader, asked = await under_way(victim, 4, at_least=10)
    victim.server._process.send_signal(signal.SIGTERM)
    await reader.until(lambda: reader.died is not None, timeout_s=60)
    assert isinstance(reader.died, EngineDied)
    # vLLM says "abort" on each stream if it gets to it before it kills its own core
    assert {reader.responses[i].finished for i in range(4)} <= {"aborted", ""}
    for i, prompt in enumerate(asked):
        assert_under(server.versions[0], prompt, reader.responses[i])
    await reader.close()


@killing(MAIN)
async def test_a_layer_without_weights_fails_the_update_in_the_worker(server, tmp_path, monkeypatch):
    """Trap 3, the second guard, for what a look at the file cannot see. Nothing is served."""
    victim = server.engine
    processes = family(victim)
    bad = save(tiny("qwen3", tied=True, seed=1), tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, bad / "model.safetensors")
    monkeypatch.setattr(type(victim._serving.model), "check_same_tensors", lambda *_: None)
    with pytest.raises(EngineDied, match="layers got no weights"):
        await victim.load(1, bad)
    assert victim.version is None
    await assert_gone(processes)
