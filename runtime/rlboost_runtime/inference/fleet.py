"""The endpoint's connection to the coordinator: requests out, their tokens in, whatever happens to either.

Guarantees: the tokens of a request come in order, each once, also through restarts of the coordinator: it is
asked again from the token after the last that is here; whoever stops reading a request withdraws it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.protocol.messages import (
    SCHEMA,
    EndpointCommand,
    EndpointHello,
    EndpointWelcome,
    GenerateMessage,
    Message,
    Refused,
    TokensMessage,
    WithdrawMessage,
    endpoint_command_decoder,
)
from rlboost_runtime.protocol.session import Conversation, CoordinatorSession
from rlboost_runtime.seams import Clock, Transport

UNREAD_S = 5.0
"""Readers come in the same moment, unless their client has left."""


class RequestLost(RuntimeFault):
    """The request is over without its last token."""


@dataclass(slots=True)
class GrowingResponse:
    """What is here of one response. Shapes: ids and logprobs have the same length."""

    request: GenerateMessage
    ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    versions: list[int] = field(default_factory=list)
    """Policy versions that made it, in order."""
    finish_reason: str = ""
    problem: str = ""
    is_delivered: bool = False
    """Its client has all of it."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """True if nothing more comes."""
        return bool(self.finish_reason or self.problem)

    def take(self, message: TokensMessage) -> None:
        """Add what is new of a message."""
        new = len(self.ids) - message.offset
        if new >= 0:
            self.ids += array("i", message.token_ids)[new:]
            self.logprobs += array("f", message.logprobs)[new:]
            self.versions += [v for v, _ in message.versions if v not in self.versions]
            self.finish_reason, self.problem = message.finish_reason, message.problem
            self._news.set()

    async def grown(self, beyond: int, timeout_s: float) -> bool:
        """Wait until there are more than `beyond` tokens or it is over; return False after `timeout_s`.

        Raises `RequestLost`.
        """
        while len(self.ids) <= beyond and not self.is_over:
            self._news.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return False
        if self.problem and len(self.ids) <= beyond:
            raise RequestLost(self.problem, "send the request again")
        return True


class Fleet:
    """All requests of this process."""

    def __init__(self, run: str, dial: Callable[[], Awaitable[Transport]], clock: Clock) -> None:
        self._run = run
        self.version: int | None = None
        """The newest policy version when the coordinator was last reached."""
        self._open: dict[str, GrowingResponse] = {}
        self._readers: dict[str, int] = {}
        self._unread: dict[str, asyncio.TimerHandle] = {}  # opened, and not read yet
        self._withdrawn: list[str] = []  # while there was no connection
        conversation: Conversation[EndpointWelcome, EndpointCommand] = Conversation(
            EndpointWelcome, endpoint_command_decoder, self._hello, self._welcomed, self._received
        )
        self._session = CoordinatorSession(dial, conversation, clock)

    @property
    def is_up(self) -> bool:
        """True while the coordinator is there."""
        return self._session.is_up

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._open)

    def num_open_with(self, requests: Sequence[GenerateMessage]) -> int:
        """Return how many there would be with these, of which some may be under way."""
        return len(self._open) + sum(each.request_id not in self._open for each in requests)

    def is_another(self, request: GenerateMessage) -> bool:
        """Return True if a request of that name is under way that asks for something else."""
        known = self._open.get(request.request_id)
        return known is not None and known.request != request

    async def run(self) -> None:
        """Keep the connection until cancelled. Raises `RLBoostError` when another attempt is pointless."""
        await self._session.run()

    def open(self, requests: Sequence[GenerateMessage]) -> None:
        """Request responses to be read; one that is not read within `UNREAD_S` is withdrawn."""
        later = asyncio.get_running_loop().call_later
        for request in requests:
            name = request.request_id
            if name not in self._open:
                self._open[name], self._readers[name] = GrowingResponse(request), 0
                self._unread[name] = later(UNREAD_S, self._withdraw, name)
                self._session.post(request)

    @asynccontextmanager
    async def read(self, name: str, linger_s: float = 0.0) -> AsyncIterator[GrowingResponse]:
        """Follow an open response; it grows within the context, and is withdrawn after the last reader's: if
        it is not delivered, `linger_s` later, so that its client may ask for it again.

        Raises `RequestLost`.
        """
        response = self._open.get(name)
        if response is None:
            raise RequestLost("it was not read for too long", "send the request again")
        if name in self._unread:
            self._unread.pop(name).cancel()
        self._readers[name] += 1
        try:
            yield response
        finally:
            self._readers[name] -= 1
            if response.is_delivered or response.problem or not linger_s:
                self._withdraw(name)
            elif not self._readers[name]:
                asyncio.get_running_loop().call_later(linger_s, self._withdraw, name)

    def fail_all(self, problem: str) -> None:
        """End every request with `problem`."""
        for response in self._open.values():
            response.take(TokensMessage(response.request.request_id, len(response.ids), problem=problem))

    def _withdraw(self, name: str) -> None:
        """Forget a request that nobody reads any more."""
        if self._readers.get(name, 1):
            return
        del self._readers[name], self._open[name]
        self._unread.pop(name, None)
        if self.is_up:
            self._session.post(WithdrawMessage(name))
        else:
            self._withdrawn.append(name)

    def _hello(self) -> EndpointHello:
        return EndpointHello(SCHEMA, self._run)

    def _welcomed(self, welcome: EndpointWelcome) -> list[Message]:
        self.version = welcome.version
        gone, self._withdrawn = self._withdrawn, []
        again = (
            msgspec.structs.replace(response.request, offset=len(response.ids))
            for response in self._open.values()
            if not response.is_over
        )
        return [*map(WithdrawMessage, gone), *again]

    def _received(self, message: EndpointCommand) -> None:
        if isinstance(message, Refused | EndpointWelcome):
            raise ConnectionError(f"unexpected {type(message).__name__}")
        response = self._open.get(message.request_id)
        if response is not None:
            response.take(message)
