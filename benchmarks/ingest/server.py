"""The server under test, as a process of its own: the coordinator's port, links, core, tokens and journal.

Everything between the socket and the disk is the coordinator's own: TLS, registration, leases, core, event
log, token store, journal, acknowledgement. Only the fleet and the trainer are stood in for: machines are
"launched" at once, and one large step is asked for at the start. `GET /v1/status` returns the event loop's
lag, how long dispatches took, and the counts since it was asked last.

    python -m benchmarks.ingest.server FOLDER --responses N --agents N --max-tokens N
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from rlboost_runtime.coordinator.driver import ingest as gc_tuning
from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.driver.ingest import Ingest
from rlboost_runtime.coordinator.driver.totals import recover
from rlboost_runtime.coordinator.links.agents import AgentLinks, InstanceStats, Timing
from rlboost_runtime.coordinator.links.server import Handlers, bind, make_app, make_server
from rlboost_runtime.coordinator.links.weights import WeightTracker
from rlboost_runtime.coordinator.observers.boot_times import BootTimes
from rlboost_runtime.core.base.messages import (
    Abort,
    Assign,
    CoreConfig,
    Event,
    Evict,
    GrantLease,
    LaunchMachine,
    LoadVersion,
    MachineLaunched,
    RecallLease,
    Sleep,
    TerminateMachine,
    VersionPublished,
    Wake,
)
from rlboost_runtime.protocol.messages import (
    AssignMessage,
    DeliverGroupMessage,
    PromptSpec,
    StepStartedMessage,
    WorkItem,
    agent_command_decoder,
)
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.security import create_secrets, read_token
from rlboost_runtime.seams import SystemClock, SystemDisk, Transport

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


class Dispatches:
    """Milliseconds from the event that let the core assign a response until its `AssignMessage` was handed to
    the connection; `cpu_*`: of this process's CPU time, which is what it takes on a core of its own."""

    def __init__(self) -> None:
        self._applied_at = 0.0, 0.0
        self._pending: dict[int, tuple[float, float]] = {}
        self._taken_s: list[tuple[float, float]] = []

    def timed(self, apply: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return `apply`, which notes when it was called."""

        def noted(event: Event) -> None:
            self._applied_at = time.perf_counter(), time.process_time()
            apply(event)

        return noted

    def assigned(self, assignment: int) -> None:
        """The core has assigned a response."""
        self._pending[assignment] = self._applied_at

    def sent(self, message: bytes) -> None:
        """A message was handed to a connection."""
        if b"AssignMessage" not in message[:32]:
            return
        now, cpu_s = time.perf_counter(), time.process_time()
        command = agent_command_decoder.decode(message)
        assert isinstance(command, AssignMessage)
        for item in command.items:
            applied_at, applied_cpu_s = self._pending.pop(item.assignment)
            self._taken_s.append((now - applied_at, cpu_s - applied_cpu_s))

    def take(self) -> dict[str, float]:
        """Return quantiles and the number since the last call."""
        taken_ms, self._taken_s = 1e3 * np.array(self._taken_s or [(0.0, 0.0)]), []
        (p50, cpu_p50), (p99, cpu_p99) = np.percentile(taken_ms, [50, 99], axis=0)
        found = {"p50_ms": p50, "p99_ms": p99, "cpu_p50_ms": cpu_p50, "cpu_p99_ms": cpu_p99}
        return {**found, "count": len(taken_ms)}


class TimedTransport:
    """A connection whose messages are noted once they are sent."""

    def __init__(self, inner: Transport, dispatches: Dispatches) -> None:
        self._inner = inner
        self._dispatches = dispatches
        self.receive, self.close = inner.receive, inner.close

    async def send(self, message: bytes) -> None:
        """Send and note it."""
        await self._inner.send(message)
        self._dispatches.sent(message)


class BenchedCoordinator:
    """A coordinator with real agents; machines appear when asked for, and nobody trains."""

    def __init__(self, run: RunFolder, num_agents: int) -> None:
        self.config = CoreConfig(max_spot_instances=num_agents, reserved_instances=0)
        run.journal.mkdir(parents=True)
        recovered = recover(run.events)
        timing = Timing.of(self.config)
        weights = WeightTracker()
        stats = InstanceStats(weights, timing.flush_s)
        boot_times = BootTimes(lambda: recovered.core.machines)
        self.driver = CoreDriver(
            run, recovered, SystemClock(), SystemDisk(), self, (stats,), keep_journal=False
        )
        self.dispatches = Dispatches()
        self.driver.apply = self.dispatches.timed(self.driver.apply)  # type: ignore[method-assign, assignment]
        ingest = Ingest(self.driver, (boot_times,))
        self.agents = AgentLinks(self.driver, ingest, weights, boot_times, stats, timing, frozenset())
        self._max_pending_bytes = 0

    def to_agent(self, command: Abort | LoadVersion | Sleep | Wake | Evict) -> None:
        """Send a command to an agent."""
        self.agents.carry_out(command)

    def work(self, command: Assign, item: WorkItem) -> None:
        """Send work to an agent."""
        self.agents.work(command, item)
        self.dispatches.assigned(command.assignment)

    async def agent(self, transport: Transport, machine: str | None = None) -> None:
        """Serve an agent's connection."""
        await self.agents.serve(TimedTransport(transport, self.dispatches), machine)

    def fleet(self, command: LaunchMachine | TerminateMachine) -> None:
        """Launch at once."""
        if isinstance(command, LaunchMachine):
            self.driver.apply(MachineLaunched(self.driver.now(), command.machine))

    def deliver(self, group: DeliverGroupMessage) -> None:
        """Nobody asks."""

    def lease(self, command: GrantLease | RecallLease) -> None:
        """Nobody asks."""

    async def begin(self, num_responses: int, max_tokens: int) -> None:
        """Ask for one large step."""
        self.driver.begin(self.config)
        self.driver.apply(VersionPublished(self.driver.now(), 0))
        prompts = tuple(PromptSpec(group, _PROMPT) for group in range(num_responses // _GROUP_SIZE))
        await self.driver.open_step(StepStartedMessage(0, 0, prompts, _GROUP_SIZE, max_tokens))

    async def tick(self) -> None:
        """Let the core see time pass."""
        while True:
            self.driver.tick()
            self._max_pending_bytes = max(self._max_pending_bytes, self.driver.journal.pending_bytes)
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
    made = BenchedCoordinator(run, num_agents)
    made.driver.journal.start(loop)
    handlers = Handlers(
        agent=made.agent,
        trainer=_refuse,
        requests=_refuse,
        status=lambda: {"loop_lag": lag.take(), "dispatch": made.dispatches.take(), **made.counts()},
        preempt=_refuse,
        stop=lambda *_: None,
        runtime=_nothing,
        wheels=_no_wheels,
        is_live=lambda _: True,
    )
    server = make_server(make_app(handlers, read_token(run)), run)
    gc_tuning.relax()
    lag.start()
    loop.add_signal_handler(signal.SIGTERM, _end(server))
    await made.begin(num_responses, max_tokens)
    ticking = asyncio.create_task(made.tick())
    await server.serve([bind(run)])
    ticking.cancel()
    await made.driver.journal.close()


async def _no_wheels(machine: str, name: str) -> None:
    return None


def _end(server: Any) -> Callable[[], None]:  # uvicorn's server
    def end() -> None:
        server.should_exit = True

    return end


async def _nothing(machine: str) -> bytes:
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
