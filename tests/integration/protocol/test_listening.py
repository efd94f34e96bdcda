"""The sockets on which the head listens."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rlboost_runtime.protocol.transport import listening_socket

pytestmark = pytest.mark.integration


async def test_what_an_accepted_connection_is_given_to_send_leaves_at_once() -> None:
    """Else a second small message waits until the first is acknowledged, which takes up to 40 ms."""
    accepted: list[int] = []
    done = asyncio.Event()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain = writer.get_extra_info("socket")
        accepted.append(plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()
        done.set()

    server = await asyncio.start_server(connected, sock=listening_socket("127.0.0.1", 0))
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        async with asyncio.timeout(5):
            await done.wait()
        writer.close()
        await writer.wait_closed()
    assert accepted == [1]


def test_a_taken_port_is_an_error_and_leaves_nothing_open() -> None:
    with listening_socket("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", first.getsockname()[1])
