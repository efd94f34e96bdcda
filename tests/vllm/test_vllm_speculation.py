"""Speculative decoding changes speed only, and is turned off while requests run where it does not pay."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from rlboost_runtime.engines.base import EngineProgress, Request
from rlboost_runtime.engines.vllm import drafts
from tests.vllm.vllm_rig import DRAFTING, MARKS, UNKNOWN_FLAG, Reader, assert_under, counter

pytestmark = MARKS

REPEATING = [7, 8, 9, 10, 11, 12] * 8
DRAFTS = "spec_decode_num_draft_tokens"

drafting = pytest.mark.parametrize("server", [DRAFTING], indirect=True)


@pytest_asyncio.fixture(loop_scope="session")
async def answers(server):
    async with Reader.of(server.engine) as reader:
        yield reader


async def drafts_of_a_request(engine, reader, number: int) -> float:
    """Run a request whose text repeats itself; return the tokens that were proposed for it."""
    before = await counter(engine, DRAFTS)
    engine.submit([Request(number, REPEATING, 60)])
    await reader.ends([number])
    return await counter(engine, DRAFTS) - before


@drafting
async def test_an_option_that_the_server_does_not_know_is_left_out(server):
    assert not server.engine.server.has_flag(UNKNOWN_FLAG)
    assert server.engine.server.has_flag("--speculative-config")
    assert server.engine.version == 0


@drafting
async def test_drafts_are_proposed_and_dropped_on_request_with_the_same_tokens(server, answers):
    engine, versions = server.engine, server.versions
    for number, on in enumerate(("1", "0", "1")):
        await engine.server.api.rpc("rlboost_draft", on=on)
        assert (await drafts_of_a_request(engine, answers, number) > 0) is (on == "1")
        assert_under(versions[0], REPEATING, answers.responses[number])
    assert answers.responses[0].ids == answers.responses[1].ids == answers.responses[2].ids


@drafting
@pytest.mark.parametrize("do_pay", [True, False])
async def test_the_gate_keeps_what_measures_faster(server, answers, monkeypatch, do_pay):
    """The rates are made up; the switch is real."""
    monkeypatch.setattr(drafts, "WINDOW_S", 0.02)
    looks, tokens, decided = 0, 0, asyncio.Event()

    def progress() -> EngineProgress:
        nonlocal looks, tokens
        looks += 1
        with_drafts = looks <= drafts.WINDOWS + 1
        tokens += 1000 if with_drafts is do_pay else 1
        if looks > 2 * drafts.WINDOWS + 2:
            decided.set()
        return EngineProgress(looks, 4, 0, tokens)

    gate = asyncio.ensure_future(drafts.gate_drafts(server.engine.server.api, progress))
    try:
        await asyncio.wait_for(decided.wait(), 60)
        assert (await drafts_of_a_request(server.engine, answers, 10) > 0) is do_pay
    finally:
        gate.cancel()
        await asyncio.gather(gate, return_exceptions=True)
        await server.engine.server.api.rpc("rlboost_draft", on="1")
