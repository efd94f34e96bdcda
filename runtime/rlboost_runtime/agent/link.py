"""The agent's connection to the coordinator: dialled, kept, dialled again for as long as it takes.

Guarantees: messages leave in the order in which they were posted; after a reconnect the owner is asked first
what to repeat; every wait on the coordinator has a deadline; attempts are jittered and at most 2 s apart.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import (
    AgentCommand,
    AgentHello,
    Message,
    Refused,
    Welcome,
    agent_command_decoder,
    encode,
)
from rlboost_runtime.seams import Clock, Transport

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
WELCOME_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0
"""A coordinator that does not read for so long is taken for gone."""
QUIET_S = 15.0
"""Silence after which we dial anew: a living coordinator answers every beat, and beats are a second apart."""
CLOSE_TIMEOUT_S = 2.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Longest pause between attempts: the lease is 6 s, and the coordinator's restart must not cost more."""
SETTLED_S = 5.0
"""A connection that lasted so long was a good one: the pauses start over."""


class CoordinatorRefused(ProtocolError):
    """The coordinator does not want this agent, now or later."""


class LinkOwner(Protocol):
    """Who the link works for."""

    def hello(self) -> AgentHello:
        """Return the first message of a new connection."""

    def welcomed(self, welcome: Welcome) -> list[Message]:
        """Take the answer; return what must be sent (again), in order."""

    def received(self, command: AgentCommand) -> None:
        """Take one command; must not wait."""


class CoordinatorSession:
    """One connection at a time. `post` before the welcome is dropped: the owner repeats what matters."""

    def __init__(self, dial: Callable[[], Awaitable[Transport]], owner: LinkOwner, clock: Clock) -> None:
        self._dial = dial
        self._owner = owner
        self._clock = clock
        self._random = random.Random()  # noqa: S311 - jitter
        self._outgoing: deque[Message] = deque()
        self._posted = asyncio.Event()
        self._drained = asyncio.Event()
        self.is_up = False
        """Whether the coordinator has welcomed us on this connection."""
        self.last_word_at = clock.now()
        """When the coordinator last said anything."""

    def post(self, message: Message) -> None:
        """Send soon, if there is a connection."""
        if self.is_up:
            self._outgoing.append(message)
            self._drained.clear()
            self._posted.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything posted has been handed to the network; False if that did not happen."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return self.is_up

    async def run(self) -> None:
        """Connect and serve for ever. Raises `ProtocolError` when asking again is pointless."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock.now()
            try:
                await self._converse()
            except (ConnectionError, TimeoutError, OSError, msgspec.DecodeError) as exc:
                event(log, "coordinator.lost", problem=repr(exc))
            if self._clock.now() - began >= SETTLED_S:
                pause_s = FIRST_PAUSE_S
            await self._clock.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _converse(self) -> None:
        """One connection, from dialling to its end."""
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            transport = await self._dial()
        try:
            await self._introduce(transport)
            await self._talk(transport)
        finally:
            self.is_up = False
            self._outgoing.clear()
            await _close(transport)

    async def _introduce(self, transport: Transport) -> None:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            await transport.send(encode(self._owner.hello()))
            answer = agent_command_decoder.decode(await transport.receive())
        self.last_word_at = self._clock.now()
        if isinstance(answer, Refused):
            if answer.retry:
                raise ConnectionError(f"refused for now: {answer.problem}")
            raise CoordinatorRefused(
                f"the coordinator refused this agent: {answer.problem}", "nothing to do here"
            )
        if not isinstance(answer, Welcome):
            raise ConnectionError(f"{type(answer).__name__} instead of a welcome")
        repeated = self._owner.welcomed(answer)
        self.is_up = True
        self._outgoing.extend(repeated)
        self._drained.clear()
        self._posted.set()

    async def _talk(self, transport: Transport) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(transport))
                tasks.create_task(self._write(transport))
        except ExceptionGroup as group:  # the first problem is the one that ended it
            raise group.exceptions[0] from group

    async def _read(self, transport: Transport) -> None:
        while True:
            async with asyncio.timeout(QUIET_S):
                data = await transport.receive()
            self.last_word_at = self._clock.now()
            self._owner.received(agent_command_decoder.decode(data))

    async def _write(self, transport: Transport) -> None:
        while True:
            self._posted.clear()
            while self._outgoing:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await transport.send(encode(self._outgoing.popleft()))
            self._drained.set()
            await self._posted.wait()


async def _close(transport: Transport) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await transport.close()
    except (ConnectionError, TimeoutError, OSError):
        pass  # it is gone already
