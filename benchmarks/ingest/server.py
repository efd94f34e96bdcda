"""The server under test, as a process of its own: the coordinator's port, links, core, tokens and journal.

Everything between the socket and the disk is the coordinator's own: TLS, registration, leases, core, event
log, token store, journal, acknowledgement. Only the fleet and the trainer are stood in for: machines are
"launched" at once, and one large step is asked for at the start. `GET /v1/status` returns the event loop's
lag and the counts since it was asked last.

    python -m benchmarks.ingest.server FOLDER --responses N --agents N --max-tokens N
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from rlboost_runtime.coordinator.driver import ingest as gc_tuning
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.links.agents import AgentLinks, Timing
from rlboost_runtime.coordinator.links.server import Handlers, bind, make_app, make_server
from rlboost_runtime.core.base.messages import (
    CoreConfig,
    GrantLease,
    LaunchMachine,
    MachineLaunched,
    RecallLease,
    TerminateMachine,
    VersionPublished,
)
from rlboost_runtime.protocol.messages import DeliverGroupMessage, PromptSpec, StepStartedMessage
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.security import create_secrets, read_token
from rlboost_runtime.seams import SystemClock, SystemDisk

_LAG_EVERY_S = 0.005
_PROMPT = b"\0" * 4 * 16
_GROUP_SIZE = 8


class LoopLag:
    """How late the event loop runs what is due: sampled with a timer, read as quantiles."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags_s: list[float] = []
        self._due = loop.time()

    def start(self) -> None:
        """Sample from now on."""
        self._due = self._loop.time() + _LAG_EVERY_S
        self._loop.call_at(self._due, self._sample)

    def take(self) -> dict[str, float]:
        """Return quantiles in milliseconds since the last call."""
        lags_ms = 1e3 * np.array(self._lags_s or [0.0])
        self._lags_s = []
        p50, p99 = np.percentile(lags_ms, [50, 99])
        return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(lags_ms.max())}

    def _sample(self) -> None:
        self._lags_s.append(max(0.0, self._loop.time() - self._due))
        self.start()


class Outlet:
    """Agents for real; machines appear when asked for, and nobody trains."""

    def __init__(self, state: CoreDriver, agents: AgentLinks) -> None:
        self.to_agent = agents.carry_out
        self.work = agents.work
        self._state = state

    def fleet(self, command: LaunchMachine | TerminateMachine) -> None:
        """Launch at once."""
        if isinstance(command, LaunchMachine):
            self._state.apply(MachineLaunched(self._state.now(), command.machine))

    def deliver(self, group: DeliverGroupMessage) -> None:
        """Nobody asks."""

    def lease(self, command: GrantLease | RecallLease) -> None:
        """Nobody asks."""


class Ingest:
    """A coordinator without fleet and trainer."""

    def __init__(self, run: RunFolder, num_agents: int) -> None:
        config = CoreConfig(max_spot_instances=num_agents, reserved_instances=0)
        run.journal.mkdir(parents=True)
        self.state = CoreDriver(run, SystemClock(), SystemDisk(), config, keep_journal=False)
        self.agents = AgentLinks(self.state, run.name, Timing(config.lease_s), frozenset())
        self.state.outlet = Outlet(self.state, self.agents)
        self._max_pending_bytes = 0

    async def begin(self, num_responses: int, max_tokens: int) -> None:
        """Ask for one large step."""
        self.state.begin()
        self.state.apply(VersionPublished(self.state.now(), 0))
        prompts = tuple(PromptSpec(group, _PROMPT) for group in range(num_responses // _GROUP_SIZE))
        await self.state.open_step(StepStartedMessage(0, 0, prompts, _GROUP_SIZE, max_tokens))

    async def tick(self) -> None:
        """Let the core see time pass."""
        while True:
            self.state.tick()
            self._max_pending_bytes = max(self._max_pending_bytes, self.state.journal.pending_bytes)
            await asyncio.sleep(0.02)

    def counts(self) -> dict[str, int]:
        """Return what was accepted and refused so far, and the most bytes that waited for the disk."""
        return {
            "tokens": self.agents.ingest.tokens_accepted,
            "refused_tokens": self.agents.ingest.tokens_dropped + self.agents.ingest.tokens_duplicate,
            "max_pending_bytes": self._max_pending_bytes,
        }


async def serve(run: RunFolder, num_responses: int, num_agents: int, max_tokens: int) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    ingest = Ingest(run, num_agents)
    ingest.state.journal.start(loop)
    handlers = Handlers(
        agent=ingest.agents.serve,
        trainer=_refuse,
        status=lambda: {"loop_lag": lag.take(), **ingest.counts()},
        preempt=_refuse,
        stop=lambda *_: None,
        runtime=_nothing,
    )
    server = make_server(make_app(handlers, read_token(run)), run)
    gc_tuning.relax()
    lag.start()
    loop.add_signal_handler(signal.SIGTERM, _end(server))
    await ingest.begin(num_responses, max_tokens)
    ticking = asyncio.create_task(ingest.tick())
    await server.serve([bind(run)])
    ticking.cancel()
    await ingest.state.journal.close()


def _end(server: Any) -> Callable[[], None]:  # uvicorn's server
    def end() -> None:
        server.should_exit = True

    return end


async def _nothing() -> bytes:
    return b""


async def _refuse(*_: object) -> None:
    raise ConnectionError("not served here")


def main() -> None:
    """Run the server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--responses", type=int, required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument(
        "--profile", action="store_true", help="print the functions that took longest at the end"
    )
    args = parser.parse_args()
    run = RunFolder(args.folder)
    create_secrets(run)
    body = serve(run, args.responses, args.agents, args.max_tokens)
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        uvloop.run(body)
        profile.disable()
        profile.print_stats("tottime")
    else:
        uvloop.run(body)


if __name__ == "__main__":
    main()
