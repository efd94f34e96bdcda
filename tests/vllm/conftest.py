"""Real vLLM on CPU: servers that tests share, because a start takes half a minute."""

from __future__ import annotations

import os

import pytest
import pytest_asyncio

from rlboost_runtime.engines.vllm import command
from rlboost_runtime.engines.vllm import engine as engine_module
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.engine_python import find_engine_python
from tests.vllm.vllm_rig import MAIN, UNKNOWN_FLAG, Reader, Servers, Versions

FLAGS = command.flags
MUST_RUN = os.environ.get("RLBOOST_REQUIRE_VLLM") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever kills servers comes last: they need not be started again (in any other order they are). After
    them a whole run, with servers of its own, while nothing else is being started."""
    items.sort(key=lambda item: ("test_vllm_run" in item.nodeid, "test_vllm_death" in item.nodeid))


@pytest.fixture(scope="session", autouse=True)
def vllm_is_here() -> None:
    """Skip on a developer's machine without vLLM; where it is required, its absence is a failure."""
    try:
        find_engine_python(None)
    except ConfigError as exc:
        if MUST_RUN:
            pytest.fail(f"vLLM is required here: {exc}")
        pytest.skip(str(exc))


def wanted_servers(item: pytest.Item) -> list[str]:
    """Names of the servers that a test uses."""
    called = getattr(item, "callspec", None)
    named = [] if called is None or "server" not in called.params else [called.params["server"]]
    return [*named, MAIN] if "engine" in getattr(item, "fixturenames", ()) else named


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers(request, tmp_path_factory, vllm_is_here):
    """All servers that the selected tests use, started in the background in the order of their use."""
    wanted = dict.fromkeys(name for item in request.session.items for name in wanted_servers(item))
    servers = Servers(tmp_path_factory.mktemp("servers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "flags", flags_and_an_unknown_one)
        patch.setattr(engine_module, "gate_drafts", no_gate)
        servers.prepare(wanted)
        yield servers
        await servers.stop()


def flags_and_an_unknown_one(spec, *rest) -> list[command.Flag]:
    """What vLLM is asked for; one server also for what no version knows."""
    found = FLAGS(spec, *rest)
    return found if spec.vllm.speculative is None else [*found, (UNKNOWN_FLAG, "7")]


async def no_gate(*_) -> None:
    """Tests switch drafts themselves."""


@pytest_asyncio.fixture(loop_scope="session")
async def engine(servers):
    """The server that most tests share: greedy, takes adapters, serves version 0 of `qwen`."""
    return (await servers.get(MAIN)).engine


@pytest.fixture
def qwen(servers) -> Versions:
    """The versions that `engine` is given."""
    return servers.versions(MAIN)


@pytest_asyncio.fixture(loop_scope="session")
async def server(servers, request):
    """Another server, by name: a test may do with it what it likes."""
    return await servers.get(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def reader(engine):
    """Reads what `engine` gives."""
    async with Reader.of(engine) as reader:
        yield reader


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where vLLM is required, a skipped test is a failed run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if MUST_RUN and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
