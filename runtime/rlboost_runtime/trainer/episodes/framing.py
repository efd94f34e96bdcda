"""Messages between the trainer and a process that plays episodes: length (u32, little-endian), then bytes."""

from __future__ import annotations

import asyncio
import struct

_HEADER = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    """Return a message as it is sent."""
    return _HEADER.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> bytes:
    """Return the next message. Raises `IncompleteReadError` once the other side is gone."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return await reader.readexactly(length)
