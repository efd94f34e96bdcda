"""The child process in which reward functions run: `python -m rlboost_runtime.trainer.rewards.child`.

It may be killed at any moment, and nothing that it prints can harm the protocol: that runs over a socket of
its own, inherited as the file descriptor given in argv; standard output and error belong to the user's code.

Protocol, length-prefixed (u32, little-endian): the parent sends one pickled `Setup`, then pickled lists of
`RewardCall`s to one prompt (from the trainer's process to its own child, so that rows arrive as the very
objects that the data set made); the child answers the setup with one msgpack `Answer`, then each list with a
list of them, in order. Nothing from the child is ever unpickled.

A user's function is called with those of `prompt` (str), `response` (str, without the end-of-text token) and
`row` (dict: the line of the data file, or the reasoning-gym entry) that it has parameters for; one with a
parameter `responses` is called once for all responses to a prompt. Both may be asynchronous: an asynchronous
function of one response is awaited for all responses to a prompt at the same time::

    def score(prompt: str, response: str, row: dict) -> float: ...
    def score_group(prompt: str, responses: list[str], row: dict) -> list[float]: ...

Its memory is limited, if the setup says so, before anything of the user's is imported.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import os
import pickle
import queue
import resource
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rlboost_runtime.protocol.reward_parameters import GROUP_OFFERED, OFFERED, unknown_in_words
from rlboost_runtime.trainer.rewards.builtin import built_in
from rlboost_runtime.trainer.rewards.outcome import (
    Answer,
    RewardCall,
    Score,
    ScoreGroup,
    Setup,
    explain_exception,
)

_TOO_LATE = "no answer within reward_timeout_s"
_runner = asyncio.Runner()
_HEADER = struct.Struct("<I")


class GroupCall(NamedTuple):
    """The responses to one prompt."""

    prompt: str
    responses: list[str]
    row: dict[str, Any]


def send(connection: socket.socket, data: bytes) -> None:
    """Send one message."""
    connection.sendall(_HEADER.pack(len(data)) + data)


def receive(connection: socket.socket) -> bytes:
    """Return the next message; raises `EOFError` once the other side is gone."""
    (length,) = _HEADER.unpack(_exactly(connection, _HEADER.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def main(fd: int) -> None:
    """Serve the socket `fd` until the parent closes it, which ends the process even inside a user's
    function."""
    connection = socket.socket(fileno=fd)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    setup = pickle.loads(inbox.get())  # noqa: S301 - from our own parent
    folder = Path(setup.folder)
    try:
        if setup.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
        score, takes_groups = load(setup)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: a user's module may raise anything
        send(connection, msgspec.msgpack.encode(Answer(failure="load", problem=_explain(error, folder))))
        return
    send(connection, msgspec.msgpack.encode(Answer(takes_groups=takes_groups)))
    while True:
        calls: list[RewardCall] = pickle.loads(inbox.get())  # noqa: S301 - from our own parent
        send(connection, msgspec.msgpack.encode(evaluate(score, calls, folder)))


def _read(connection: socket.socket, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def evaluate(score: ScoreGroup, calls: Sequence[RewardCall], folder: Path) -> list[Answer]:
    """Return the rewards of the responses to one prompt, or which kinds of failures they were. Never
    raises."""
    try:
        values = score(calls)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: also SystemExit of a user's function
        values = [error] * len(calls)
    return [_judged(value, folder) for value in values]


def _finished(value: object) -> object:
    """Return what `value` is, or comes to where it is to be awaited: always in the same event loop, so that
    connections may be kept."""

    async def wait() -> object:
        return await value  # type: ignore[misc]  # that was asked

    return _runner.run(wait()) if inspect.isawaitable(value) else value


def _judged(value: object, folder: Path) -> Answer:
    match value:
        case MemoryError():
            return Answer(failure="memory", problem=_explain(value, folder))
        case TimeoutError() if value.args == (_TOO_LATE,):
            return Answer(failure="timeout", problem=_TOO_LATE)
        case BaseException():
            return Answer(failure="raised", problem=_explain(value, folder))
    return judge(value)


def judge(value: object) -> Answer:
    """Accept finite numbers only: int, float, bool, and scalars of numpy or torch."""
    if isinstance(value, str | bytes | bytearray):
        return Answer(failure="not_a_number", problem=f"returned {value!r:.200}")
    try:
        number = float(value)  # type: ignore[arg-type]  # that is the question
    except BaseException:  # noqa: BLE001 - an object of the user's
        return Answer(failure="not_a_number", problem=f"returned a {type(value).__name__}")
    if not math.isfinite(number):
        return Answer(failure="not_finite", problem=f"returned {number}")
    return Answer(reward=number)


def load(setup: Setup) -> tuple[ScoreGroup, bool]:
    """Return the function that scores, and whether it gets all responses to a prompt at once. Raises
    whatever importing the user's file raises, or `ValueError`."""
    if ":" not in setup.reward:
        return _one_by_one(built_in(setup.reward)), False
    function = import_callable(Path(setup.folder), setup.reward)
    if "responses" in inspect.signature(function).parameters:
        return _group(adapt(function, GROUP_OFFERED)), True
    score = adapt(function, OFFERED)
    if inspect.iscoroutinefunction(function):
        return _at_the_same_time(score, setup.timeout_s), True
    return _one_by_one(score), False


def _one_by_one(score: Score) -> ScoreGroup:
    def each(call: RewardCall) -> object:
        try:
            return _finished(score(call))
        except BaseException as error:  # noqa: BLE001 - as in `evaluate`
            return error

    return lambda calls: [each(call) for call in calls]


def _at_the_same_time(score: Score, timeout_s: float | None) -> ScoreGroup:
    """Await the coroutines of all responses together, each for `timeout_s`."""

    async def one(call: RewardCall) -> object:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await score(call)  # type: ignore[misc]  # a coroutine function
        except TimeoutError:
            if deadline.expired():
                raise TimeoutError(_TOO_LATE) from None
            raise

    async def all_of(calls: Sequence[RewardCall]) -> list[object]:
        return await asyncio.gather(*map(one, calls), return_exceptions=True)

    return lambda calls: _runner.run(all_of(calls))


def _group(score: Callable[[GroupCall], object]) -> ScoreGroup:
    def at_once(calls: Sequence[RewardCall]) -> list[object]:
        call = GroupCall(calls[0].prompt, [each.response for each in calls], calls[0].row)
        values: Any = _finished(score(call))  # whatever the user's function returns
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
            raise TypeError(f"returned a {type(values).__name__}, not a list of rewards")
        if len(values) != len(calls):
            rewards = "reward" if len(values) == 1 else "rewards"
            raise ValueError(f"returned {len(values)} {rewards} for {len(calls)} responses")
        return list(values)

    return at_once


def import_callable(folder: Path, function: str) -> Callable[..., object]:
    """Return what `file.py:name` in `folder` is. Raises whatever the file raises, or `ValueError`."""
    file, _, name = function.rpartition(":")
    path = folder / file
    os.chdir(folder)
    sys.path[:0] = [str(path.parent)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found: object = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{file} has no function {name}")
    return found


def adapt(function: Callable[..., object], offered: tuple[str, ...]) -> Callable[[Any], object]:
    """Return a caller that passes those fields of a call, all `offered`, that `function` has parameters for.

    Raises `ValueError` if it requires others.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_ONLY]
    required += [p.name for p in named if p.default is p.empty and p.name not in offered]
    if required:
        raise ValueError(unknown_in_words(required, offered))
    wanted = offered if takes_all else tuple(p.name for p in named if p.name in offered)
    return lambda call: function(**{name: getattr(call, name) for name in wanted})


def _explain(error: BaseException, folder: Path) -> str:
    """Return one line for people; the traceback goes to the log, where output has its bounds."""
    traceback.print_exception(error)
    return explain_exception(error, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
