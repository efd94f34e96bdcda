"""`TransformersEngine`: a Hugging Face model in a child process, batched continuously.

The child lives in a session of its own and never outlives this process (`child`). It sends one message
per decode step; it stops while too many of them wait to be read from `outputs`, so memory is bounded on both
sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

from rlboost_runtime.engines.base import (
    NO_PROGRESS,
    EngineDied,
    EngineOutput,
    EngineProgress,
    EngineSpec,
    KvCache,
    LoadFailed,
    Request,
    device_environment,
)
from rlboost_runtime.engines.transformers import channel, preloaded
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.processes import ENGINE_SOCKET, MACHINE_TAG

log = logging.getLogger(__name__)

MAX_UNREAD_STEPS = 256
"""Decode steps that wait for the reader of `outputs` before the child is held: a second of a fast engine."""
COMMAND_TIMEOUT_S = 600.0
"""Longest load or probe; a child that takes longer is considered dead."""
ABORT_TIMEOUT_S = 60.0
"""Longest decode step that an abort may have to wait for."""
STOP_GRACE_S = 1.0
"""Time the child gets to end by itself before it is killed."""


class ForkedProcess:
    """A child that is not ours to reap, with what is needed of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)  # names this process for ever, also once its number is reused
        self.returncode: int | None = None

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait for its end; its exit status is its parent's."""
        loop = asyncio.get_running_loop()
        while self.returncode is None:
            ended = asyncio.Event()
            loop.add_reader(self._pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._pidfd)
            self.returncode = 0
            os.close(self._pidfd)
        return self.returncode


async def _forked(link_fd: int, log_fd: int) -> ForkedProcess | None:
    """Return a child forked by `preloaded`; None where that process is not there."""
    path, machine = os.environ.get(ENGINE_SOCKET), os.environ.get(MACHINE_TAG)
    if path is None or machine is None:
        return None
    try:
        pid = await asyncio.to_thread(preloaded.ask, Path(path), machine, link_fd, log_fd)
        return ForkedProcess(pid)
    except (preloaded.NoChild, ProcessLookupError):
        return None


class TransformersEngine(asyncio.Protocol):
    """See `engines.base.Engine` for the contract. It is also the protocol of its end of the socket pair."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._link: asyncio.Transport | None = None
        self._unpacker = channel.Unpacker()
        self._ready = asyncio.Event()
        self._died: str | None = None
        self._stopped = False
        self._version: int | None = None
        self._tickets: dict[int, asyncio.Future[channel.Done]] = {}
        self._next_ticket = 0
        self._outputs: deque[EngineOutput] = deque()
        self._news = asyncio.Event()
        self._holding = False
        self._progress = NO_PROGRESS
        self._kv_cache: KvCache | None = None
        self.phases_s: dict[str, float] = {}
        """Seconds of the child's start, by phase."""

    @property
    def kv_cache(self) -> KvCache | None:
        """The child's paged cache; None before the first load."""
        return self._kv_cache

    @property
    def version(self) -> int | None:
        """Policy version being served."""
        return self._version

    @property
    def pid(self) -> int | None:
        """The child's process id, once started."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float) -> None:
        """Start the child and wait until it can load weights. Raises `EngineDied`."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                self._process = await self._spawn(theirs.fileno())
            await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        self._send(channel.Configure(self._spec, os.getpid()))
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            await self.stop()
            raise EngineDied(f"the engine was not ready within {timeout_s:g} s", self._see_log()) from None
        self._check_alive()
        if self._spec.tokens_per_s_per_response is not None:
            event(log, "engine.paced", tokens_per_s_per_response=self._spec.tokens_per_s_per_response)
        event(log, "engine.started", pid=self._process.pid, phases_s=self.phases_s)

    def submit(self, requests: list[Request]) -> None:
        """Queue requests."""
        self._send(channel.Submit(requests))

    async def abort(self, request_ids: list[int]) -> None:
        """Stop these; their last outputs are queued when this returns. Raises `EngineDied`."""
        await self._call(channel.AbortRequests(self._ticket(), request_ids), ABORT_TIMEOUT_S)

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield outputs until the engine stops. Raises `EngineDied`. One consumer."""
        while True:
            while self._outputs:
                output = self._outputs.popleft()
                if self._holding and len(self._outputs) <= MAX_UNREAD_STEPS // 2:
                    self._hold(False)
                yield output
            if self._stopped:
                return
            self._check_alive()
            self._news.clear()
            await self._news.wait()

    async def load(self, version: int, folder: Path) -> None:
        """Take the weights in `folder`. Raises `LoadFailed`, `EngineDied`."""
        self._version = None
        done = await self._call(channel.LoadWeights(self._ticket(), version, str(folder)), COMMAND_TIMEOUT_S)
        if done.problem:
            raise LoadFailed(f"version {version} does not load: {done.problem}", self._see_log())
        self._kv_cache = done.kv_cache
        self._version = version

    async def greedy(self, token_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        """Return the greedy continuation and its logprobs. Raises `RuntimeFault`, `EngineDied`."""
        request = channel.ProbeRequest(self._ticket(), token_ids, max_new_tokens)
        done = await self._call(request, COMMAND_TIMEOUT_S)
        if done.problem:
            raise RuntimeFault(f"the probe failed: {done.problem}", self._see_log())
        return done.token_ids, done.logprobs

    async def sleep(self) -> None:
        """Free weights and KV cache. Raises `RuntimeFault`, `EngineDied`."""
        done = await self._call(channel.DropWeights(self._ticket()), COMMAND_TIMEOUT_S)
        if done.problem:
            raise RuntimeFault(f"the engine cannot sleep: {done.problem}", "abort its requests first")
        self._version = None

    async def wake(self) -> None:
        """Allow loading again. Raises `EngineDied`."""
        await self._call(channel.TakeMemory(self._ticket()), COMMAND_TIMEOUT_S)

    def progress(self) -> EngineProgress:
        """Return counters as of the child's last message."""
        return self._progress

    async def stop(self) -> None:
        """End the child; idempotent."""
        self._stopped = True
        self._version = None
        self._news.set()
        if self._process is None:
            return
        if self._died is None:
            self._send(channel.Quit())
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()  # it has no children of its own
            await self._process.wait()
        if self._link is not None:
            self._link.close()

    # --- what the link reports ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep our end of the link."""
        self._link = cast(asyncio.Transport, transport)  # what a socket connection gives

    def data_received(self, data: bytes) -> None:
        """Handle the child's messages that are complete now."""
        for body in self._unpacker.feed(data):
            self._on_message(body)

    def _on_message(self, body: bytes) -> None:
        match channel.to_parent_decoder.decode(body):
            case channel.Tokens() as tokens:
                self._on_tokens(tokens)
            case channel.Done() as done:
                waiting = self._tickets.pop(done.ticket, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(done)
            case channel.Alive(counter=counter):
                self._progress = replace(self._progress, counter=counter)
            case channel.Ready(phases_s=phases_s):
                self.phases_s = phases_s
                self._ready.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the child, or of its side of the socket."""
        self._died = "the engine's process ended"
        self._version = None
        for waiting in self._tickets.values():
            if not waiting.done():
                waiting.set_exception(self._death())
        self._tickets.clear()
        self._ready.set()
        self._news.set()

    # --- helpers ------------------------------------------------------------------------------------------

    def _on_tokens(self, tokens: channel.Tokens) -> None:
        generated = self._progress.tokens_generated + len(tokens.output.token_ids)
        self._progress = EngineProgress(
            tokens.counter, tokens.running, tokens.waiting, generated, 0, tokens.kv_free_tokens
        )
        self._outputs.append(tokens.output)
        self._news.set()
        if not self._holding and len(self._outputs) > MAX_UNREAD_STEPS:
            self._hold(True)

    def _hold(self, on: bool) -> None:
        self._holding = on
        self._send(channel.Hold(on))

    async def _spawn(self, fd: int) -> asyncio.subprocess.Process | ForkedProcess:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self._spec.threads),
            "HF_HUB_OFFLINE": "1",  # everything comes in the version's folder
            "TOKENIZERS_PARALLELISM": "false",
            **device_environment(self._spec.devices),
        }
        with self._spec.log.open("ab") as log_file:
            if (forked := await _forked(fd, log_file.fileno())) is not None:
                return forked
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rlboost_runtime.engines.transformers.child",
                str(fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(fd,),
                start_new_session=True,
                env=environment,
            )

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    async def _call(
        self, command: channel.AbortRequests | channel.IdleCommand, timeout_s: float
    ) -> channel.Done:
        self._check_alive()
        answer: asyncio.Future[channel.Done] = asyncio.get_running_loop().create_future()
        self._tickets[command.ticket] = answer
        self._send(command)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self._kill()
            raise EngineDied(
                f"the engine did not answer within {timeout_s:g} s and was killed", self._see_log()
            ) from None
        finally:
            self._tickets.pop(command.ticket, None)

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _send(self, message: channel.ToChild) -> None:
        """Write without waiting (the loop buffers); to a dead child nothing, as `outputs` reports its end."""
        if self._link is not None and self._died is None:
            self._link.write(channel.pack(message))

    def _check_alive(self) -> None:
        if self._died is not None:
            raise self._death()

    def _death(self) -> EngineDied:
        return EngineDied(self._died or "the engine's process ended", self._see_log())

    def _see_log(self) -> str:
        return f"see {self._spec.log}"
