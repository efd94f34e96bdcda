"""Events and commands as lines of JSON, and a log of events driven through a fresh core.

Guarantees: `decode_event(encode_event(e)) == e` for every event, floats to the last bit; a line holds no
newline but its last byte. Lines are read leniently: unknown keys are ignored and missing ones take their
default, so that a log of an older version can be read.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from typing import Any

from rlboost_runtime.core.base.messages import Command, Event, Heartbeat
from rlboost_runtime.core.core import Core

Convert = Callable[[Any], Any]  # between a value and its JSON form, either way

_FORMER_NAMES = {"Beat": Heartbeat}
"""Names under which earlier versions logged events."""


def encode_event(event: Event) -> bytes:
    """Return the event as one line, newline included."""
    return _encode("event", event)


def encode_command(command: Command) -> bytes:
    """Return the command as one line, newline included."""
    return _encode("command", command)


def decode_event(line: bytes | str) -> Event:
    """Return the event on a line. Raises `ValueError` for anything else."""
    return typing.cast("Event", _decode("event", Event, line))


def decode_command(line: bytes | str) -> Command:
    """Return the command on a line. Raises `ValueError` for anything else."""
    return typing.cast("Command", _decode("command", Command, line))


def replay(lines: Iterable[bytes]) -> tuple[Core, list[list[Command]]]:
    """Drive a log through a fresh core; return it and the commands that followed from each event.

    A last line that a crash left unfinished is not an event. Raises `ValueError` for any other bad line.
    """
    core = Core()
    commands: list[list[Command]] = []
    broken: ValueError | None = None
    for line in lines:
        if broken is not None:
            raise broken
        try:
            event = decode_event(line)
        except ValueError as problem:
            broken = problem
            continue
        commands.append(core.handle(event))
    return core, commands


def _encode(key: str, message: Event | Command) -> bytes:
    kind: type = type(message)
    plain = {key: kind.__name__, **_encoder(kind)(message)}
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n"


def _decode(key: str, union: types.UnionType, line: bytes | str) -> object:
    plain = json.loads(line.decode() if isinstance(line, bytes) else line)  # of bytes it guesses the coding
    if not isinstance(plain, dict) or key not in plain:
        raise ValueError(f"not an {key}: {line[:200]!r}")
    kind = _kinds(union).get(plain[key])
    if kind is None:
        raise ValueError(f"unknown {key} {plain[key]!r}")
    try:
        return _decoder(kind)(plain)
    except (TypeError, KeyError) as problem:
        raise ValueError(f"{key} {kind.__name__}: {problem}") from problem


@cache
def _kinds(union: types.UnionType) -> dict[str, type]:
    kinds = typing.get_args(union)
    former = {name: kind for name, kind in _FORMER_NAMES.items() if kind in kinds}
    return former | {kind.__name__: kind for kind in kinds}


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
