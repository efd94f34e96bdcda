"""Real vLLM on CPU: servers that tests share, because a start takes half a minute."""

from __future__ import annotations

import os

import pytest
import pytest_asyncio

from rlboost_runtime.engines.base import VllmOptions
from rlboost_runtime.engines.vllm import VllmServerEngine
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.vllm_python import find_engine_python
from tests.vllm.vllm_rig import Reader, Versions, spec_for

MUST_RUN = os.environ.get("RLBOOST_REQUIRE_VLLM") == "1"


@pytest.fixture(scope="session", autouse=True)
def vllm_is_here() -> None:
    """Skip on a developer's machine without vLLM; where it is required, its absence is a failure."""
    try:
        find_engine_python(None)
    except ConfigError as exc:
        if MUST_RUN:
            pytest.fail(f"vLLM is required here: {exc}")
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> Versions:
    return Versions("qwen3", True, tmp_path_factory.mktemp("qwen"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tmp_path_factory, qwen):
    """A greedy engine with LoRA and drafts on, started once; a test loads the version that it needs."""
    folder = tmp_path_factory.mktemp("engine")
    options = VllmOptions(kv_cache_mib=64, max_lora_rank=8)
    engine = VllmServerEngine(spec_for(folder, vllm=options))
    try:
        await engine.start(60)
        await engine.load(0, qwen.folder(0))
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def reader(engine):
    reader = Reader(engine)
    yield reader
    await engine.abort(list(engine.streams.open))
    await reader.close()
    engine._queue.take()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where vLLM is required, a skipped test is a failed run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if MUST_RUN and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
