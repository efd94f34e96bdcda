"""The endpoint's side of the coordinator: requests outside a step in, their tokens out once they are durable.

One connection per endpoint process. What it asks for is its own: another connection that asks for the same
request takes it over.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from rlboost_runtime.coordinator.driver.core_driver import CoreDriver
from rlboost_runtime.coordinator.storage.request_tokens import RequestTokens
from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.logs import event as log_event
from rlboost_runtime.protocol import messages as wire
from rlboost_runtime.protocol.session import accept
from rlboost_runtime.seams import Transport

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60.0
"""The endpoint reads all the time: one that does not for so long hangs."""


@dataclass(slots=True)
class _Wanted:
    """A request that a connection waits for: how many tokens of it were sent."""

    sent: int


class RequestLink:
    """One endpoint's open connection."""

    def __init__(self, driver: CoreDriver, transport: Transport) -> None:
        self._driver = driver
        self._desk = driver.requests
        self._transport = transport
        self._wanted: dict[str, _Wanted] = {}
        self._news: dict[str, wire.TokensMessage | None] = {}  # None: look at what there is
        self._wake = asyncio.Event()

    async def serve(self) -> None:
        """Serve until the connection ends."""
        self._desk.listeners.add(self._heard)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(tasks))
                tasks.create_task(self._write())
        except* (ConnectionError, TimeoutError) as group:
            log_event(log, "endpoint.disconnected", problem=repr(group.exceptions[0]))
        except* (ProtocolError, *wire.UNREADABLE) as group:
            log_event(log, "endpoint.protocol_error", problem=str(group.exceptions[0]))
        finally:
            self._desk.listeners.discard(self._heard)
            for name in self._wanted:
                self._desk.unwanted(name, self._heard)

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            message = wire.endpoint_message_decoder.decode(await self._transport.receive())
            match message:
                case wire.GenerateMessage():
                    self._wanted[message.request_id] = _Wanted(message.offset)
                    tasks.create_task(self._take(message))
                case wire.WithdrawMessage(request_id=name):
                    self._wanted.pop(name, None)
                    self._desk.withdraw(name)
                case wire.EndpointHello():
                    raise ProtocolError("a second EndpointHello", "install one version of rlboost")

    async def _take(self, message: wire.GenerateMessage) -> None:
        name = message.request_id
        try:
            tokens = await self._desk.take(message, self._heard)
        except ProtocolError as refusal:
            self._say(name, wire.TokensMessage(name, message.offset, problem=refusal.problem))
            return
        if message.offset > len(tokens.ids):
            text = f"{message.offset} tokens of it were delivered, {len(tokens.ids)} are known"
            self._say(name, wire.TokensMessage(name, message.offset, problem=text))
            return
        self._heard(tokens)

    def _heard(self, tokens: RequestTokens) -> None:
        if tokens.request.request_id in self._wanted:
            self._say(tokens.request.request_id, None)

    def _say(self, name: str, message: wire.TokensMessage | None) -> None:
        self._news[name] = message
        self._wake.set()

    async def _write(self) -> None:
        welcome = wire.EndpointWelcome(self._driver.core.newest_version)
        await self._send(welcome)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._news:
                name = next(iter(self._news))
                message = self._news.pop(name) or self._newest_of(name)
                if message is not None:
                    await self._send(message)

    async def _send(self, message: wire.Message) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._transport.send(wire.encode(message))

    def _newest_of(self, name: str) -> wire.TokensMessage | None:
        """Return what of a request was not sent yet; None: nothing."""
        wanted, tokens = self._wanted.get(name), self._desk.known(name)
        if wanted is None or tokens is None:
            return None
        start, end = wanted.sent, tokens.durable
        is_last = tokens.is_over
        if start >= end and not is_last and not tokens.problem:
            return None
        wanted.sent = max(start, end)
        return wire.TokensMessage(
            request_id=name,
            offset=start,
            token_ids=tokens.ids[start:end].tobytes(),
            logprobs=tokens.logprobs[start:end].tobytes(),
            versions=tokens.versions(start),
            finish_reason=str(tokens.reason or "") if is_last else "",
            problem=tokens.problem,
        )


async def serve_requests(driver: CoreDriver, transport: Transport) -> None:
    """Serve one connection of an endpoint until it ends."""
    hello = await accept(transport, wire.endpoint_message_decoder, wire.EndpointHello, driver.run.name)
    if hello is not None:
        log_event(log, "endpoint.connected")
        await RequestLink(driver, transport).serve()
