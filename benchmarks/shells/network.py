"""Connections between processes that are late, cut, or silently dead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random

from benchmarks.shells.loop import OUTSIDE, Process

CONNECT_S = (0.001, 0.02)
LATENCY_S = (0.0005, 0.03)
SLOW_SHARE, SLOW_S = 0.01, (0.1, 2.0)
"""Some messages are much later than others."""
APART_S = 1e-6
"""Between two messages of one sender: a loop runs what is due at the same moment in any order."""


class End:
    """One end of a connection: a `Transport`."""

    def __init__(self, network: Network, owner: Process) -> None:
        self._network = network
        self.owner = owner
        self.other: End
        self._inbox: deque[bytes] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._arrives_at = 0.0
        self.is_closed = False
        self.is_mute = False
        """What is sent disappears, as on a path that broke without a word."""

    async def send(self, message: bytes) -> None:
        """Send; it arrives later, in order, or not at all."""
        if self.is_closed:
            raise ConnectionResetError("closed")
        self._network.sent(self, message)
        if not self.is_mute:
            self._at_other(lambda: self.other.arrive(message))

    async def receive(self) -> bytes:
        """Return the next message."""
        while not self._inbox:
            if self.is_closed:
                raise ConnectionResetError("closed")
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._inbox.popleft()

    async def close(self) -> None:
        """Close; the other end learns of it."""
        self.shut()

    def shut(self) -> None:
        """As the kernel closes the connections of a process that ended."""
        if not self.is_closed:
            self.is_closed = True
            self._wake()
            if not self.is_mute:
                self._at_other(self.other.drop)

    def drop(self) -> None:
        """The other end is gone."""
        self.is_closed = True
        self._wake()

    def arrive(self, message: bytes) -> None:
        """Take in a message."""
        if not self.is_closed:
            self._inbox.append(message)
            self._wake()

    def _at_other(self, act: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._arrives_at = max(self._arrives_at + APART_S, loop.time() + self._network.latency_s())
        loop.call_at(self._arrives_at, act, context=OUTSIDE.copy())

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Network:
    """All connections. `on_message(sender, message)` sees each that is sent."""

    def __init__(self, random: Random, on_message: Callable[[str, bytes], None]) -> None:
        self._random = random
        self._on_message = on_message
        self.ends: list[End] = []
        self.num_messages = 0

    def latency_s(self) -> float:
        """How long the next message takes."""
        span = SLOW_S if self._random.random() < SLOW_SHARE else LATENCY_S
        return self._random.uniform(*span)

    def sent(self, end: End, message: bytes) -> None:
        """Note a message."""
        self.num_messages += 1
        self._on_message(end.owner.name, message)

    async def connect(self, caller: Process, called: Process | None) -> tuple[End, End]:
        """Return both ends of a new connection. Raises `ConnectionError` where nobody listens."""
        await asyncio.sleep(self._random.uniform(*CONNECT_S))
        if called is None or not called.is_alive:
            raise ConnectionRefusedError("nobody listens")
        near, far = End(self, caller), End(self, called)
        near.other, far.other = far, near
        self.ends += [near, far]
        return near, far

    def open_ends(self) -> list[End]:
        """Return those that are open at both ends, the first of each pair."""
        self.ends = [end for end in self.ends if not end.is_closed and end.owner.is_alive]
        return [end for end in self.ends if not end.other.is_closed and not end.is_mute][::2]

    def ended(self, process: Process, *, silently: bool) -> None:
        """Close what a process held; silently: its machine is gone, and nobody is told."""
        for end in self.ends:
            if end.owner is process:
                if silently:
                    end.is_mute = end.is_closed = True
                else:
                    end.shut()
