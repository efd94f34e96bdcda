"""Emulated agents: they speak the real protocol over real TLS sockets and make up their tokens.

An agent proves any version that it is told to load, takes whatever work it is given, and generates for each
assignment at the asked rate until its limit. Tokens that find the window of unacknowledged frames full wait
and travel in a later, larger frame, as a real agent's do.
"""

from __future__ import annotations

import asyncio
import multiprocessing.synchronize
import ssl
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray

import numpy as np
import uvloop
from numpy.typing import NDArray

from benchmarks.ingest.websocket_client import RawWebSocket
from rlboost_runtime.protocol import messages as wire
from rlboost_runtime.run.security import client_context

_POOL_TOKENS = 1 << 20
_BEAT_S = 1.0

SENT_TOKENS, ACKED_TOKENS, SENT_FRAMES, ACKED_FRAMES, FULL_WINDOWS, WORKING = range(6)
"""Places in the array of counters that a load process shares with the benchmark."""
NUM_COUNTERS = 6


@dataclass(frozen=True, slots=True)
class Load:
    """What the agents of one process do."""

    url: str  # https://HOST:PORT
    token: str
    certificate: str  # PEM
    run: str
    first_agent: int
    num_agents: int
    responses_per_agent: int  # upper bound, told as max_running
    tokens_per_s: float  # per response
    flush_s: float
    window: int  # most unacknowledged frames
    flood: bool  # as fast as acknowledgements come, frames of the same shape
    spread: bool = False  # responses stop after 10 to 100 % of their limit, so that they do not end together


class TokenPool:
    """Random token ids and logprobs, handed out in slices: no frame is like the last."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._ids = generator.integers(0, 150_000, _POOL_TOKENS, dtype="<i4").tobytes()
        self._logprobs = (-generator.exponential(1.0, _POOL_TOKENS)).astype("<f4").tobytes()
        self._at = 0

    def take(self, num_tokens: int) -> tuple[bytes, bytes]:
        """Return the next `num_tokens` ids and logprobs."""
        if self._at + num_tokens > _POOL_TOKENS:
            self._at = 0
        start, end = 4 * self._at, 4 * (self._at + num_tokens)
        self._at += num_tokens
        return self._ids[start:end], self._logprobs[start:end]


class EmulatedAgent:
    """One agent: a connection, its assignments and its frames. Time is counted in flush intervals."""

    def __init__(self, number: int, load: Load, pool: TokenPool, counters: NDArray[np.int64]) -> None:
        self.ack_delays_s: list[float] = []
        self._load = load
        self._name = f"spot-{number}/0"
        self._pool = pool
        self._counters = counters
        self._socket = RawWebSocket(self._on_message)
        self._generator = np.random.default_rng(number)
        self._unacknowledged: deque[tuple[int, int, float]] = deque()  # seq, tokens, when sent
        self._seq = 0
        self._version = 0
        self._progress = 0
        self._running = False
        self._assignments = np.zeros(0, "<u4")
        self._offsets = np.zeros(0, np.int64)
        self._limits = np.zeros(0, np.int64)
        self._due = np.zeros(0, np.float64)  # tokens generated and not sent, with a fraction
        self._endings: list[wire.AssignmentEnd] = []

    async def connect(self, context: ssl.SSLContext) -> None:
        """Connect and introduce itself."""
        await self._socket.connect(self._load.url + "/v1/agent", self._load.token, context)
        hello = wire.AgentHello(
            schema=wire.SCHEMA,
            run=self._load.run,
            instance=self._name,
            machine=self._name.split("/")[0],
            pool="spot",
            max_running=self._load.responses_per_agent,
            kv_tokens=1 << 31,
            engine="emulated",
        )
        self._send(hello)

    def start(self) -> None:
        """Start to generate."""
        self._running = True
        if self._load.flood:
            self._fill_window()

    def stop(self) -> None:
        """Generate no more; acknowledgements are still counted."""
        self._running = False

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def generate(self, num_flushes: float) -> None:
        """Let `num_flushes` flush intervals of time pass, then send what is due."""
        self._due += num_flushes * self._load.flush_s * self._load.tokens_per_s
        if len(self._unacknowledged) >= self._load.window or not self._socket.writable:
            self._counters[FULL_WINDOWS] += 1
            return
        self._flush()

    def beat(self) -> None:
        """Send a heartbeat."""
        rate = self._load.tokens_per_s * len(self._assignments)
        self._send(wire.HeartbeatMessage(self._progress, len(self._assignments), 0, rate))

    @property
    def num_assignments(self) -> int:
        """Assignments that it works on."""
        return len(self._assignments)

    def _fill_window(self) -> None:
        while (
            self._running
            and self._socket.writable
            and len(self._unacknowledged) < self._load.window
            and len(self._assignments)
        ):
            self._due += self._load.flush_s * self._load.tokens_per_s
            self._flush()

    def _flush(self) -> None:
        counts = np.minimum(self._due.astype(np.int64), self._limits - self._offsets).clip(0, 65_535)
        moved = counts > 0
        num_tokens = int(counts.sum())
        if not num_tokens and not self._endings:
            return
        token_ids, logprobs = self._pool.take(num_tokens)
        part = slice(None) if moved.all() else moved
        assignments, offsets, moved_counts = self._assignments[part], self._offsets[part], counts[part]
        columns = (
            assignments.tobytes(),
            offsets.astype("<u4").tobytes(),
            moved_counts.astype("<u2").tobytes(),
        )
        self._offsets += counts
        self._due -= counts
        self._end_full()
        frame = wire.Frame(self._seq, self._version, *columns, token_ids, logprobs, tuple(self._endings))
        self._endings.clear()
        self._unacknowledged.append((self._seq, num_tokens, time.perf_counter()))
        self._seq += 1
        self._progress += num_tokens
        self._counters[SENT_TOKENS] += num_tokens
        self._counters[SENT_FRAMES] += 1
        self._send(frame)

    def _end_full(self) -> None:
        full = self._offsets >= self._limits
        if full.any():
            ended = self._assignments[full].tolist()
            reason = "stop" if self._load.spread else "length"
            self._endings += [wire.AssignmentEnd(assignment, reason) for assignment in ended]
            self._keep(~full)

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self._assignments, self._offsets = self._assignments[kept], self._offsets[kept]
        self._limits, self._due = self._limits[kept], self._due[kept]

    def _send(self, message: wire.Message) -> None:
        self._socket.send(wire.encode(message))

    # --- what the coordinator says -----------------------------------------------------------------------

    def _on_message(self, data: bytes) -> None:
        match wire.agent_command_decoder.decode(data):
            case wire.Ack(seq=seq):
                self._on_ack(seq)
            case wire.AssignMessage(items=items):
                self._on_work(items)
            case wire.AbortMessage(assignments=assignments):
                aborted = np.isin(self._assignments, np.array(assignments, "<u4"))
                self._endings += [
                    wire.AssignmentEnd(a, "aborted") for a in self._assignments[aborted].tolist()
                ]
                self._keep(~aborted)
            case wire.LoadVersionMessage(version=version):
                self._version = version
                self._send(wire.InstanceReadyMessage(version))
            case wire.WakeMessage():
                self._send(wire.InstanceReadyMessage(self._version))
            case wire.SleepMessage():
                self._send(wire.SleptMessage())
            case wire.Refused(problem=problem):
                raise ConnectionError(f"{self._name} was refused: {problem}")
            case wire.Stop():
                self._socket.close()
            case wire.Welcome():
                pass

    def _on_ack(self, seq: int) -> None:
        now = time.perf_counter()
        while self._unacknowledged and self._unacknowledged[0][0] <= seq:
            _, num_tokens, sent_at = self._unacknowledged.popleft()
            self._counters[ACKED_TOKENS] += num_tokens
            self._counters[ACKED_FRAMES] += 1
            self.ack_delays_s.append(now - sent_at)
        if self._load.flood:
            self._fill_window()

    def _on_work(self, items: tuple[wire.WorkItem, ...]) -> None:
        offsets = np.array([item.offset for item in items], np.int64)
        self._assignments = np.append(self._assignments, np.array([i.assignment for i in items], "<u4"))
        self._offsets = np.append(self._offsets, offsets)
        limits = np.array([item.max_new_tokens for item in items], np.int64)
        if self._load.spread:
            limits = (limits * self._generator.uniform(0.1, 1.0, len(items))).astype(np.int64).clip(1)
        self._limits = np.append(self._limits, offsets + limits)
        self._due = np.append(self._due, self._generator.random(len(items)))  # out of step with one another
        self._version = items[0].policy_version
        self._counters[WORKING] += len(items)


def run_load(
    load: Load,
    counters: SynchronizedArray[int],
    go: multiprocessing.synchronize.Event,
    end: multiprocessing.synchronize.Event,
    results: Connection,
) -> None:
    """Body of a load process: connect, wait for `go`, generate until `end`, send the ack delays (s)."""
    own: NDArray[np.int64] = np.frombuffer(memoryview(counters.get_obj()), np.int64)
    delays = uvloop.run(_run_agents(load, own, go, end))
    results.send(delays[:: max(1, len(delays) // 20_000)])
    results.close()


async def _run_agents(
    load: Load,
    counters: NDArray[np.int64],
    go: multiprocessing.synchronize.Event,
    end: multiprocessing.synchronize.Event,
) -> list[float]:
    pool = TokenPool(load.first_agent)
    context = client_context(load.certificate)
    agents = [EmulatedAgent(load.first_agent + i, load, pool, counters) for i in range(load.num_agents)]
    for agent in agents:
        await agent.connect(context)
    beats = asyncio.create_task(_beat(agents))
    await asyncio.to_thread(go.wait)
    for agent in agents:
        agent.start()
    paces = None if load.flood else asyncio.create_task(_pace(agents, load.flush_s))
    await asyncio.to_thread(end.wait)
    for task in (beats, paces):
        if task is not None:
            task.cancel()
    for agent in agents:
        agent.stop()
    await asyncio.gather(*(task for task in (beats, paces) if task is not None), return_exceptions=True)
    await asyncio.sleep(0.3)  # late acknowledgements
    for agent in agents:
        agent.close()
    return [delay for agent in agents for delay in agent.ack_delays_s]


async def _pace(agents: list[EmulatedAgent], flush_s: float) -> None:
    """Let each agent flush every `flush_s`, evenly spread over the interval; time lost is caught up."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    last = [start] * len(agents)
    turn = 0
    while True:
        due_at = start + (turn + 1) * flush_s / len(agents)
        now = loop.time()
        if due_at > now:
            await asyncio.sleep(due_at - now)
            now = loop.time()
        index = turn % len(agents)
        agents[index].generate((now - last[index]) / flush_s)
        last[index] = now
        turn += 1
        if turn % len(agents) == 0:
            await asyncio.sleep(0)  # when late, let acknowledgements in


async def _beat(agents: list[EmulatedAgent]) -> None:
    while True:
        for agent in agents:
            agent.beat()
            await asyncio.sleep(_BEAT_S / len(agents))
