"""A session of an agent or trainer with the coordinator: dialled, kept, dialled again as often as it takes.

Guarantees: messages leave in the order in which they were posted; each connection begins with a hello, and
after the welcome with what the owner wants repeated; a message that could not be sent before a connection
ended is not kept; waits on the coordinator have deadlines; attempts are jittered and at most 2 s apart.

`accept` and `refuse` are the coordinator's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    UNREADABLE,
    AgentHello,
    EndpointHello,
    Message,
    Refused,
    TrainerHello,
    encode,
)
from rlboost_runtime.seams import Backoff, Clock, Transport

log = logging.getLogger(__name__)


class RunIsOver(ProtocolError):
    """The coordinator refused a peer because the run ends: a normal end for that peer."""


DIAL_TIMEOUT_S = 10.0
WELCOME_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0
"""A connection that does not introduce itself within this time is closed."""
REFUSE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Longest pause between attempts: the lease is 6 s, and the coordinator's restart must not cost more."""
SETTLED_S = 5.0
"""After a connection that lasted this long, pauses start over at `FIRST_PAUSE_S`."""

W = TypeVar("W", bound=Message)
C = TypeVar("C", bound=Message)
H = TypeVar("H", AgentHello, TrainerHello, EndpointHello)


def _ignore() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Conversation(Generic[W, C]):
    """What is sent and received over a session. No callback may wait."""

    welcome: type[W]
    decoder: msgspec.msgpack.Decoder[C]
    hello: Callable[[], Message]
    """Returns the first message of a new connection."""
    welcomed: Callable[[W], Iterable[Message]]
    """Takes the answer; returns what must be sent (again), in order."""
    received: Callable[[C], None]
    """Takes a command; raises `ProtocolError` to end the session."""
    sent: Callable[[], None] = _ignore
    """Called after each message that was handed to the network."""
    lost: Callable[[], None] = _ignore
    """Called when a connection has ended; what was posted and not sent is dropped."""


class CoordinatorSession(Generic[W, C]):
    """One connection at a time. `post` before the welcome is dropped: the owner repeats what matters."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[Transport]],
        conversation: Conversation[W, C],
        clock: Clock,
        *,
        send_timeout_s: float | None = None,
        quiet_s: float | None = None,
    ) -> None:
        """A coordinator that reads nothing for `send_timeout_s`, or sends nothing for `quiet_s`, counts as
        gone; None: no such limit, for peers on the coordinator's own machine."""
        self._dial = dial
        self._conversation = conversation
        self._clock = clock
        self._send_timeout_s = send_timeout_s
        self._quiet_s = quiet_s
        self._outgoing: deque[Message] = deque()
        self._posted = asyncio.Event()
        self._drained = asyncio.Event()
        self.is_up = False
        """True once the coordinator has welcomed us on the present connection."""
        self.last_received_at = clock.now()

    def post(self, message: Message) -> None:
        """Send soon, if there is a connection."""
        if self.is_up:
            self._outgoing.append(message)
            self._drained.clear()
            self._posted.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything posted was handed to the network; return False if that did not happen."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return self.is_up

    async def run(self) -> None:
        """Connect and serve forever. Raises `RLBoostError` when another attempt is pointless."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            began = self._clock.now()
            try:
                await self._connect()
            except (ConnectionError, TimeoutError, OSError, *UNREADABLE) as exc:
                event(log, "coordinator.lost", problem=repr(exc))
            if self._clock.now() - began >= SETTLED_S:
                backoff.reset()
            await self._clock.sleep(backoff.next_s())

    async def _connect(self) -> None:
        """Hold one connection, from dialling to its end."""
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            transport = await self._dial()
        try:
            await self._introduce(transport)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(transport))
                tasks.create_task(self._write(transport))
        except ExceptionGroup as group:  # the first problem is the one that ended it
            raise group.exceptions[0] from group
        finally:
            self.is_up = False
            self._outgoing.clear()
            self._conversation.lost()
            await _close(transport)

    async def _introduce(self, transport: Transport) -> None:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            await transport.send(encode(self._conversation.hello()))
            answer = self._conversation.decoder.decode(await transport.receive())
        self.last_received_at = self._clock.now()
        if isinstance(answer, Refused):
            if answer.retry:
                raise ConnectionError(f"refused for now: {answer.problem}")
            if answer.is_run_over:
                raise RunIsOver(answer.problem, "nothing to do")
            raise ProtocolError(
                f"the coordinator refused us: {answer.problem}", "install one version of rlboost"
            )
        if not isinstance(answer, self._conversation.welcome):
            raise ConnectionError(f"{type(answer).__name__} instead of a welcome")
        self._outgoing.extend(self._conversation.welcomed(answer))
        self.is_up = True
        self._drained.clear()
        self._posted.set()

    async def _read(self, transport: Transport) -> None:
        while True:
            async with asyncio.timeout(self._quiet_s):
                data = await transport.receive()
            self.last_received_at = self._clock.now()
            self._conversation.received(self._conversation.decoder.decode(data))

    async def _write(self, transport: Transport) -> None:
        while True:
            self._posted.clear()
            while self._outgoing:
                async with asyncio.timeout(self._send_timeout_s):
                    await transport.send(encode(self._outgoing.popleft()))
                self._conversation.sent()
            self._drained.set()
            await self._posted.wait()


async def _close(transport: Transport) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await transport.close()
    except (ConnectionError, TimeoutError, OSError):
        pass  # it is gone already


async def accept(
    transport: Transport,
    decoder: msgspec.msgpack.Decoder[C],
    kind: type[H],
    run: str,
    refusal_of: Callable[[H], Refused | None] = lambda _: None,
) -> H | None:
    """Receive the hello of a new connection; return None if there was none, or if it was refused."""
    peer = kind.__name__.removesuffix("Hello").lower()
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = decoder.decode(await transport.receive())
    except (TimeoutError, ConnectionError, *UNREADABLE) as problem:
        event(log, f"{peer}.hello_failed", problem=repr(problem))
        return None
    if not isinstance(hello, kind):
        await refuse(transport, Refused(f"the first message must be {kind.__name__}"))
        return None
    if hello.schema[0] != SCHEMA[0]:
        refusal: Refused | None = Refused(
            f"{peer} speaks schema {hello.schema}, coordinator {SCHEMA}: install one version"
        )
    elif hello.run != run:
        refusal = Refused(f"{peer} belongs to run {hello.run}, this is {run}")
    else:
        refusal = refusal_of(hello)
    if refusal is None:
        return hello
    await refuse(transport, refusal)
    return None


async def refuse(transport: Transport, refusal: Refused) -> None:
    """Send a refusal if the peer still takes it."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(REFUSE_TIMEOUT_S):
            await transport.send(encode(refusal))
