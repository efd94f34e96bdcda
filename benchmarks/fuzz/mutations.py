"""Mutations of bytes and of msgpack: random flips, cuts, copies, and values that parsers trip over."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec

NASTY: tuple[Any, ...] = (
    *(0, 1, -1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1),
    *(math.nan, math.inf, -math.inf, -0.0, 1e308),
    *("", "x" * 200_000, "\0", "spot-1/0", "../../etc", b"", b"\xff" * 4_096),
    *(None, True, [], {}, [[[[]]]], {"a": math.nan}),
)


def mutated(data: bytes, random: Random) -> bytes:
    """Return `data` with one to four random changes of its bytes."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        end = min(len(changed), at + random.choice((1, 2, 4, 8, 64)))
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = random.randbytes(random.choice((1, 4, 64)))
            case 3:
                changed[at:at] = changed[at:end]
            case 4:
                changed[at:end] = random.choice((b"\0", b"\xff", b"\x7f")) * (end - at)
            case _:
                del changed[at:]
    return bytes(changed)


def respelled(data: bytes, random: Random) -> bytes:
    """Return the msgpack in `data` with one of its values, anywhere within, replaced by a nasty one."""
    plain = msgspec.msgpack.decode(data)
    places = list(_places(plain))
    holder, key = random.choice(places)
    known = holder[key]
    if isinstance(known, bytes) and random.random() < 0.7:
        holder[key] = mutated(known, random)
    elif isinstance(known, int) and random.random() < 0.5:
        holder[key] = known + random.choice((-1, 1, 2, 1000))
    else:
        holder[key] = random.choice(NASTY)
    return msgspec.msgpack.encode(plain)


def _places(value: Any) -> Any:
    """Yield each (container, key) within `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(pairs):
        yield value, key
        yield from _places(each)
