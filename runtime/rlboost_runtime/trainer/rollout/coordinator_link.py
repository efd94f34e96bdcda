"""A trainer's connection to the coordinator, kept open by a thread of its own.

Guarantees: it dials again until it is closed or refused for good; each connection begins with a hello, and
with all that `on_welcome` says the coordinator may not know yet, in that order; a message that could not be
sent before a connection ended is not kept here: the next `on_welcome` repeats what matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rlboost_runtime.errors import ConfigError, ProtocolError, RLBoostError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import (
    Message,
    Refused,
    TrainerCommand,
    TrainerHello,
    TrainerWelcome,
    encode,
    trainer_command_decoder,
)
from rlboost_runtime.seams import Transport

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
CLOSE_TIMEOUT_S = 5.0


class Connect(Protocol):
    """`rlboost_runtime.protocol.transport.connect`, or a scripted one in tests."""

    def __call__(
        self, url: str, token: str, certificate_pem: str, *, timeout_s: float
    ) -> Awaitable[Transport]:
        """Open a connection."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Who speaks over the link; all are called on the link's thread."""

    hello: Callable[[], TrainerHello]
    """What each connection begins with."""
    on_welcome: Callable[[TrainerWelcome], Iterable[Message]]
    """What the coordinator may not know then. Called under the lock."""
    on_command: Callable[[TrainerCommand], None]
    """Takes what the coordinator says; raises `ProtocolError` to end the link."""


@dataclass(frozen=True, slots=True)
class Dialling:
    """Where and how to connect. `url` is asked before each dial; None: not known yet."""

    url: Callable[[], str | None]
    token: str
    certificate_pem: str
    connect: Connect


class CoordinatorLink:
    """See the module. `changed` guards all state here and in the conversation, and is notified of changes."""

    def __init__(self, changed: threading.Condition, dialling: Dialling, conversation: Conversation) -> None:
        self._changed = changed
        self._dialling = dialling
        self._conversation = conversation
        self._problem: BaseException | None = None
        self._closing = False
        self._connected = False
        self._outbox: deque[Message] = deque()
        self._num_unsent = 0
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_loop, name="coordinator-link")

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def say(self, message: Message) -> None:
        """Queue a message if connected; otherwise the next connection begins with what matters. Call it under
        the lock."""
        if not self._connected:
            return
        self._outbox.append(message)
        self._num_unsent += 1
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    def has_said_all(self, timeout_s: float) -> bool:
        """Wait until everything was sent; whether it was, within `timeout_s`. Call it under the lock."""
        return self._changed.wait_for(
            lambda: self._problem is not None or (self._connected and self._num_unsent == 0), timeout_s
        ) and (self._problem is None)

    def raise_problem(self) -> None:
        """Raise what ended the link, if anything did. Call it under the lock."""
        if isinstance(self._problem, RLBoostError):
            raise self._problem
        if self._problem is not None:
            raise RuntimeFault(f"the step stream broke: {self._problem!r}", "see the trainer's log") from (
                self._problem
            )
        if self._closing:
            raise RuntimeFault("the step stream is closed", "open a new one")

    def close(self) -> None:
        """Say goodbye and end the thread; what was not sent yet gets `CLOSE_TIMEOUT_S`. Idempotent."""
        if not self._thread.is_alive():
            if not self._loop.is_closed():
                self._loop.close()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_unsent == 0 or not self._connected, CLOSE_TIMEOUT_S)
            self._closing = True
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        """End the connection's task: a connected one by itself, one that is still dialling at once."""
        self._wake.set()
        if self._serving is not None and not self._connected:
            self._serving.cancel()

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except asyncio.CancelledError:
            assert self._closing
        except BaseException as exc:  # noqa: BLE001 - the thread's edge: told to whoever waits
            event(log, "stream.failed", level=logging.ERROR, exc_info=True)
            self._end_with(exc)

    def _end_with(self, problem: BaseException) -> None:
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    async def _serve(self) -> None:
        """Connect again and again until closed or told never to come back."""
        self._serving = asyncio.current_task()
        backoff_s = FIRST_BACKOFF_S
        while not self._closing:
            try:
                if await self._connect_once():
                    backoff_s = FIRST_BACKOFF_S
            except (ConfigError, ProtocolError) as exc:
                self._end_with(exc)
                return
            if not self._closing:
                await self._pause(backoff_s * (0.5 + random.random()))  # noqa: S311 - jitter
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the stream is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._closing:
                    await self._wake.wait()
                    self._wake.clear()

    async def _connect_once(self) -> bool:
        """Hold one connection until it ends; whether it was welcomed."""
        url = self._dialling.url()
        if url is None:
            return False
        try:
            connection = await self._dialling.connect(
                url, self._dialling.token, self._dialling.certificate_pem, timeout_s=DIAL_TIMEOUT_S
            )
        except ConnectionError:
            return False
        try:
            return await self._converse(connection)
        finally:
            await connection.close()

    async def _converse(self, connection: Transport) -> bool:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await connection.send(encode(self._conversation.hello()))
                answer = trainer_command_decoder.decode(await connection.receive())
        except (ConnectionError, TimeoutError, msgspec.DecodeError) as exc:
            event(log, "stream.not_welcomed", level=logging.WARNING, problem=repr(exc))
            return False
        if isinstance(answer, Refused):
            if answer.retry:
                return False
            raise ProtocolError(
                f"the coordinator refused us: {answer.problem}", "install one version of rlboost"
            )
        if not isinstance(answer, TrainerWelcome):
            event(log, "stream.not_welcomed", level=logging.WARNING, problem=type(answer).__name__)
            return False
        self._welcomed(answer)
        event(log, "stream.connected", published_version=answer.published_version)
        try:
            await self._until_closed(connection)
        finally:
            self._disconnected()
        return True

    async def _until_closed(self, connection: Transport) -> None:
        reading = asyncio.create_task(self._read(connection))
        writing = asyncio.create_task(self._write(connection))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            writing.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
        for result in results:
            if isinstance(result, ConnectionError | msgspec.DecodeError):
                event(log, "stream.disconnected", level=logging.WARNING, problem=repr(result))
            elif isinstance(result, Exception):
                raise result

    def _welcomed(self, welcome: TrainerWelcome) -> None:
        """Begin the connection with everything that the coordinator may not know."""
        with self._changed:
            self._outbox = deque(self._conversation.on_welcome(welcome))
            self._num_unsent = len(self._outbox)
            self._connected = True
            self._wake.set()
            self._changed.notify_all()

    def _disconnected(self) -> None:
        with self._changed:
            self._connected = False
            self._outbox.clear()
            self._num_unsent = 0
            self._changed.notify_all()

    async def _write(self, connection: Transport) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (message := self._next_message()) is not None:
                await connection.send(encode(message))
                with self._changed:
                    self._num_unsent -= 1
                    self._changed.notify_all()
            if self._closing:
                return

    def _next_message(self) -> Message | None:
        with self._changed:
            return self._outbox.popleft() if self._outbox else None

    async def _read(self, connection: Transport) -> None:
        while True:
            self._conversation.on_command(trainer_command_decoder.decode(await connection.receive()))
