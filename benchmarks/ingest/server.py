"""The server under test, as a process of its own: the coordinator's port, token store and journal.

What stands between the port and the store here is the shortest that keeps the protocol: every agent gets an
equal share of one large step, and a frame is acknowledged once it is journalled. `GET /v1/status` returns the
event loop's lag and the counts since it was asked last.

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

from rlboost_runtime import wire
from rlboost_runtime.coordinator.journal import Journal
from rlboost_runtime.coordinator.server import Handlers, bind, make_app, make_server
from rlboost_runtime.coordinator.token_store import Accepted, TokenStore
from rlboost_runtime.run_folder import RunFolder
from rlboost_runtime.seams import SystemDisk, Transport
from rlboost_runtime.security import create_secrets, read_token

_LAG_EVERY_S = 0.005
_PROMPT = b"\0" * 4 * 16


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


class Ingest:
    """One large step for all agents: hands out work, takes frames, acknowledges them."""

    def __init__(self, folder: Path, num_responses: int, num_agents: int, max_tokens: int) -> None:
        self.journal = Journal(folder, SystemDisk(), self._on_problem)
        self._store = TokenStore()
        self._store.open_step(0, range(num_responses), max_tokens, ())
        self._shares = np.array_split(np.arange(num_responses), num_agents)
        self._max_tokens = max_tokens
        self._next_assignment = 0
        self._num_tokens = 0
        self._num_refused = 0
        self._max_pending_bytes = 0

    async def serve(self, transport: Transport) -> None:
        """Serve one agent until its connection closes."""
        hello = wire.agent_message_decoder.decode(await transport.receive())
        if not isinstance(hello, wire.AgentHello):
            raise TypeError(f"expected AgentHello, got {hello!r}")
        await transport.send(wire.encode(wire.Welcome(1, False, -1, 6.0, 1.0, 0.05, "")))
        await transport.send(wire.encode(wire.Work(self._assign(hello.instance))))
        acks = Acks(transport)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(acks.write())
                tasks.create_task(self._read(transport, acks))
        except* ConnectionError:
            pass  # the agent has gone, as agents do

    def counts(self) -> dict[str, int]:
        """Return what was accepted and refused so far, and the most bytes that waited for the disk."""
        return {
            "tokens": self._num_tokens,
            "refused_tokens": self._num_refused,
            "max_pending_bytes": self._max_pending_bytes,
        }

    def _assign(self, instance: str) -> tuple[wire.WorkItem, ...]:
        items: list[wire.WorkItem] = []
        for response in self._shares.pop().tolist():
            self._next_assignment += 1
            offset = self._store.assign(self._next_assignment, response, instance)
            items.append(
                wire.WorkItem(self._next_assignment, _PROMPT, offset, self._max_tokens, response // 8, 0)
            )
        return tuple(items)

    async def _read(self, transport: Transport, acks: Acks) -> None:
        while True:
            message = wire.agent_message_decoder.decode(await transport.receive())
            if isinstance(message, wire.Frame):
                self._on_frame(message, acks)

    def _on_frame(self, frame: wire.Frame, acks: Acks) -> None:
        accepted: Accepted = self._store.accept(frame)
        self._num_tokens += accepted.num_accepted
        self._num_refused += accepted.num_dropped + accepted.num_duplicate
        self.journal.append(accepted.record or b"", lambda: acks.acknowledge(frame.seq))
        self._max_pending_bytes = max(self._max_pending_bytes, self.journal.pending_bytes)

    def _on_problem(self, problem: str | None) -> None:
        print(problem, flush=True)


class Acks:
    """Acknowledgements of one connection; the newest number stands for all."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._newest = -1
        self._wake = asyncio.Event()

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq` is journalled."""
        self._newest = seq
        self._wake.set()

    async def write(self) -> None:
        """Send acknowledgements until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._transport.send(wire.encode(wire.Ack(self._newest)))


async def serve(run: RunFolder, num_responses: int, num_agents: int, max_tokens: int) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    lag = LoopLag(loop)
    ingest = Ingest(run.journal, num_responses, num_agents, max_tokens)
    ingest.journal.start(loop)
    ingest.journal.open_step(0)
    handlers = Handlers(
        agent=ingest.serve,
        trainer=_refuse,
        status=lambda: {"loop_lag": lag.take(), **ingest.counts()},
        preempt=_refuse,
        stop=lambda *_: None,
    )
    server = make_server(make_app(handlers, read_token(run)), run)
    lag.start()
    loop.add_signal_handler(signal.SIGTERM, _end(server))
    await server.serve([bind(run)])
    await ingest.journal.close()


def _end(server: Any) -> Callable[[], None]:  # uvicorn's server
    def end() -> None:
        server.should_exit = True

    return end


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
