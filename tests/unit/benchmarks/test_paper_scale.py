"""The emulated engine and the checks of the paper-scale run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from benchmarks.paper_scale.engine import ModelledEngine
from benchmarks.paper_scale.scenario import FILE, Checks, Scenario, tokens_of
from rlboost_runtime.agent.engine_host import ENGINE, make_engine
from rlboost_runtime.engines.base import EngineSpec, Request, VllmOptions
from rlboost_runtime.processes import RUN_TAG
from rlboost_runtime.protocol.messages import Sampling

SCENARIO = Scenario("paper-8b", 0, 4, 24)
NAME = 7


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / FILE).write_bytes(msgspec.json.encode(SCENARIO))
    monkeypatch.setenv(RUN_TAG, str(tmp_path))
    monkeypatch.setenv(ENGINE, "benchmarks.paper_scale.engine:ModelledEngine")
    reserved = VllmOptions(may_sleep=True)
    return EngineSpec(
        "transformers", Sampling(), 1024, 256, "float32", 0, vllm=reserved, log=tmp_path / "engine-0.log"
    )


async def generate(spec: EngineSpec, request: Request) -> tuple[list[int], str]:
    engine = make_engine(spec)
    assert isinstance(engine, ModelledEngine)
    engine._version = 0
    await engine.start(1.0)
    engine.submit([request])
    tokens: list[int] = []
    async for output in engine.outputs():
        tokens += output.token_ids
        if output.ended:
            await engine.stop()
            return tokens, output.ended[0].reason
    raise AssertionError("it never ended")


def test_a_response_goes_on_elsewhere_as_if_it_had_stayed(spec: EngineSpec) -> None:
    prompt = SCENARIO.prompt(0, 0)
    whole, reason = asyncio.run(generate(spec, Request(NAME, prompt, 24)))
    assert reason == "length"
    assert whole == tokens_of(NAME, 0, 24)
    kept = whole[:10]
    rest, _ = asyncio.run(generate(spec, Request(99, [*prompt, *kept], 14, priority=-10)))
    assert kept + rest == whole


def test_a_token_lost_doubled_or_changed_is_seen() -> None:
    checks, prompt = Checks(SCENARIO), SCENARIO.prompt(0, 0)
    right = tokens_of(NAME, 0, SCENARIO.length(prompt, NAME))
    assert checks.problem(prompt, right, len(right)) is None
    assert "delivered before" in str(checks.problem(prompt, right, len(right)))
    for wrong in (right[:-1], [*right[:3], right[2], *right[3:]], [*right[:5], 1, *right[6:]]):
        assert Checks(SCENARIO).problem(prompt, wrong, len(wrong)) is not None
