"""Events and commands as lines of JSON.

Guarantees: `decode_event(encode_event(e)) == e` for every event, floats to the last bit; a line holds no
newline but its last byte. Lines are read leniently: unknown keys are ignored and missing ones take their
default, so that a log of an older version can be read.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

from rlboost_runtime.core.base.messages import Command, Event, Heartbeat

Convert = Callable[[Any], Any]  # between a value and its JSON form, either way

_EVENTS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Event)} | {"Beat": Heartbeat}
"""By the name in the log; earlier versions logged a heartbeat as `Beat`."""


def encode_event(event: Event) -> bytes:
    """Return the event as one line, newline included."""
    return _encode("event", event)


def encode_command(command: Command) -> bytes:
    """Return the command as one line, newline included."""
    return _encode("command", command)


def decode_event(line: bytes | str) -> Event:
    """Return the event on a line. Raises `ValueError` for anything else."""
    plain = json.loads(line.decode() if isinstance(line, bytes) else line)  # of bytes it guesses the coding
    if not isinstance(plain, dict) or "event" not in plain:
        raise ValueError(f"not an event: {line[:200]!r}")
    kind = _EVENTS.get(plain["event"])
    if kind is None:
        raise ValueError(f"unknown event {plain['event']!r}")
    try:
        event: Event = _decoder(kind)(plain)
    except (TypeError, KeyError) as problem:
        raise ValueError(f"event {kind.__name__}: {problem}") from problem
    return event


def _encode(key: str, message: Event | Command) -> bytes:
    kind: type = type(message)
    plain = {key: kind.__name__, **_encoder(kind)(message)}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


# Enums are strings and tuples become arrays by themselves: only nested dataclasses need encoding.


@cache
def _encoder(kind: type) -> Convert:
    fields = [(name, _encoder_of(hint)) for name, hint in _hints(kind)]
    return lambda message: {name: encode(getattr(message, name)) for name, encode in fields}


def _encoder_of(hint: object) -> Convert:
    if dataclasses.is_dataclass(hint):
        return _encoder(typing.cast("type", hint))
    if typing.get_origin(hint) is tuple:
        element = typing.get_args(hint)[0]
        if dataclasses.is_dataclass(element):
            encode = _encoder(typing.cast("type", element))
            return lambda values: [encode(value) for value in values]
    return _same


@cache
def _decoder(kind: type) -> Convert:
    hints = _hints(kind)
    names = [name for name, _ in hints]
    converts = [(name, _decoder_of(hint)) for name, hint in hints]
    converts = [(name, convert) for name, convert in converts if convert is not _same]

    def decode(plain: Any) -> Any:  # a JSON object
        known = {name: plain[name] for name in names if name in plain}
        for name, convert in converts:
            if name in known:
                known[name] = convert(known[name])
        return kind(**known)

    return decode


def _decoder_of(hint: object) -> Convert:
    if dataclasses.is_dataclass(hint):
        return _decoder(typing.cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint
    if typing.get_origin(hint) is tuple:
        return _tuple_decoder(typing.get_args(hint))
    return _same


def _tuple_decoder(arguments: tuple[object, ...]) -> Convert:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        element = _decoder_of(arguments[0])
        return tuple if element is _same else lambda values: tuple(map(element, values))
    elements = [_decoder_of(argument) for argument in arguments]
    if elements == [_same, _same]:  # the token counts of heartbeats: most of a long log
        return _pair
    return lambda values: tuple(convert(value) for convert, value in zip(elements, values, strict=True))


def _pair(values: list[object]) -> tuple[object, object]:
    first, second = values
    return first, second


def _hints(kind: type) -> list[tuple[str, object]]:
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _same(value: object) -> object:
    return value
