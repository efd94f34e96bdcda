"""A raw WebSocket client (RFC 6455) for load generation: binary messages, no streams in between.

Frames are masked with the key 0: the server has to unmask them like any others, but the load generator saves
the work, which leaves more of a small machine to the server under test.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
import struct
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY, _CLOSE, _PING, _PONG = 0x2, 0x8, 0x9, 0xA


class RawWebSocket(asyncio.Protocol):
    """One connection. `on_message` runs for each binary message; `closed` is set when the connection ends."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.writable = True
        self.closed = asyncio.Event()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._buffer = bytearray()
        self._key = base64.b64encode(os.urandom(16))
        self._transport: asyncio.Transport | None = None

    async def connect(self, url: str, token: str, context: ssl.SSLContext) -> None:
        """Connect and upgrade; raises `ConnectionError` when refused."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        assert parts.hostname is not None
        assert parts.port is not None
        await loop.create_connection(lambda: self, parts.hostname, parts.port, ssl=context)
        request = (
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {self._key.decode()}\r\nSec-WebSocket-Version: 13\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        )
        assert self._transport is not None
        self._transport.write(request.encode())
        async with asyncio.timeout(30):
            await self.opened

    def send(self, message: bytes) -> None:
        """Send one binary message; `writable` says whether the socket keeps up."""
        assert self._transport is not None
        self._transport.writelines((_frame_header(_BINARY, len(message)), message))

    def close(self) -> None:
        """Close without a closing handshake."""
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(f"closed before the upgrade: {exc}"))

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.opened.done():
            self._read_upgrade()
        if self.opened.done():
            self._read_frames()

    def _read_upgrade(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        accept = base64.b64encode(hashlib.sha1(self._key + _GUID, usedforsecurity=False).digest())
        if head.startswith(b"HTTP/1.1 101") and accept in head:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(ConnectionError(head.split(b"\r\n")[0].decode()))

    def _read_frames(self) -> None:
        buffer = self._buffer
        at = 0
        while len(buffer) - at >= 2:
            opcode, length, start = buffer[at] & 0x0F, buffer[at + 1] & 0x7F, at + 2
            if length >= 126:
                width = 2 if length == 126 else 8
                if len(buffer) < start + width:
                    break
                length, start = int.from_bytes(buffer[start : start + width], "big"), start + width
            if len(buffer) < start + length:
                break
            self._on_frame(opcode, bytes(buffer[start : start + length]))
            at = start + length
        del buffer[:at]

    def _on_frame(self, opcode: int, payload: bytes) -> None:
        assert self._transport is not None
        if opcode == _BINARY:
            self._on_message(payload)
        elif opcode == _PING:
            self._transport.write(_frame_header(_PONG, len(payload)) + payload)
        elif opcode == _CLOSE:
            self._transport.close()


def _frame_header(opcode: int, length: int) -> bytes:
    if length < 126:
        return struct.pack("!BBI", 0x80 | opcode, 0x80 | length, 0)
    if length < 1 << 16:
        return struct.pack("!BBHI", 0x80 | opcode, 0x80 | 126, length, 0)
    return struct.pack("!BBQI", 0x80 | opcode, 0x80 | 127, length, 0)
