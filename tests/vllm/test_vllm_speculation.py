"""Speculative decoding changes speed only, and can be turned off while requests run."""

from __future__ import annotations

import pytest_asyncio

from rlboost_runtime.engines.base import Request, VllmOptions
from rlboost_runtime.engines.vllm import VllmServerEngine
from tests.vllm.vllm_rig import MARKS, Reader, assert_under, counter, spec_for

pytestmark = MARKS

REPEATING = [7, 8, 9, 10, 11, 12] * 8
DRAFTS = "spec_decode_num_draft_tokens"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def drafting(tmp_path_factory, qwen):
    options = VllmOptions(kv_cache_mib=64, speculative="ngram")
    engine = VllmServerEngine(spec_for(tmp_path_factory.mktemp("drafting"), vllm=options))
    try:
        await engine.start(60)
        await engine.load(0, qwen.folder(0))
        yield engine
    finally:
        await engine.stop()


async def test_drafts_are_proposed_and_dropped_on_request_with_the_same_tokens(drafting, qwen):
    reader = Reader(drafting)
    api = drafting.server.api
    responses = {}
    for number, on in enumerate(("1", "0", "1")):
        await api.rpc("rlboost_draft", on=on)
        before = await counter(drafting, DRAFTS)
        drafting.submit([Request(number, REPEATING, 60)])
        (responses[number],) = await reader.ends([number])
        assert_under(qwen[0], REPEATING, responses[number])
        assert (await counter(drafting, DRAFTS) > before) is (on == "1")
    assert responses[0].ids == responses[1].ids == responses[2].ids
    await reader.close()
