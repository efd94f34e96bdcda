"""The child process in which reward functions run: `python -m rlboost_runtime.trainer.rewards.child`.

It may be killed at any moment, and nothing that it prints can harm the protocol: that runs over a socket of
its own, inherited as the file descriptor given in argv; standard output and error belong to the user's code.

Protocol, length-prefixed (u32, little-endian): the parent sends one pickled `Setup`, then pickled
`RewardCall`s (from the trainer's process to its own child, so that rows arrive as the very objects that the
data set made); the child answers each with one msgpack `Answer`, in order. Nothing from the child is ever
unpickled.

A user's function is called with those of `prompt` (str), `response` (str, without the end-of-text token) and
`row` (dict: the line of the data file, or the reasoning-gym entry) that it has parameters for::

    def score(prompt: str, response: str, row: dict) -> float: ...

Its memory is limited, if the setup says so, before anything of the user's is imported.
"""

from __future__ import annotations

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
from collections.abc import Callable
from pathlib import Path

import msgspec

from rlboost_runtime.trainer.rewards.builtin import built_in
from rlboost_runtime.trainer.rewards.outcome import Answer, RewardCall, Score, Setup, explain_exception

OFFERED = ("prompt", "response", "row")
_HEADER = struct.Struct("<I")


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
        score = load(setup)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: a user's module may raise anything
        _answer(connection, Answer(failure="load", problem=_explain(error, folder)))
        return
    _answer(connection, Answer())
    while True:
        call: RewardCall = pickle.loads(inbox.get())  # noqa: S301 - from our own parent
        _answer(connection, evaluate(score, call, folder))


def _read(connection: socket.socket, inbox: queue.SimpleQueue[bytes]) -> None:
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def _answer(connection: socket.socket, answer: Answer) -> None:
    send(connection, msgspec.msgpack.encode(answer))


def evaluate(score: Score, call: RewardCall, folder: Path) -> Answer:
    """Return the reward, or which kind of failure it was. Never raises."""
    try:
        value = score(call)
    except MemoryError as error:
        return Answer(failure="memory", problem=_explain(error, folder))
    except BaseException as error:  # noqa: BLE001 - the edge of the process: also SystemExit of a user's function
        return Answer(failure="raised", problem=_explain(error, folder))
    return judge(value)


def judge(value: object) -> Answer:
    """Accept finite numbers only: int, float, bool, and scalars of numpy or torch."""
    if inspect.iscoroutine(value):
        value.close()
        return Answer(
            failure="not_a_number", problem="returned a coroutine: async functions are not supported"
        )
    if isinstance(value, str | bytes | bytearray):
        return Answer(failure="not_a_number", problem=f"returned {value!r:.200}")
    try:
        number = float(value)  # type: ignore[arg-type]  # that is the question
    except BaseException:  # noqa: BLE001 - an object of the user's
        return Answer(failure="not_a_number", problem=f"returned a {type(value).__name__}")
    if not math.isfinite(number):
        return Answer(failure="not_finite", problem=f"returned {number}")
    return Answer(reward=number)


def load(setup: Setup) -> Score:
    """Return the function that scores. Raises whatever importing the user's file raises, or `ValueError`."""
    if ":" in setup.reward:
        return adapt(_import(Path(setup.folder), setup.reward))
    return built_in(setup.reward)


def _import(folder: Path, function: str) -> Callable[..., object]:
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


def adapt(function: Callable[..., object]) -> Score:
    """Return a caller that passes those of prompt, response and row that `function` has parameters for.

    Raises `ValueError` if it requires others.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError("async functions are not supported")
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_ONLY]
    required += [p.name for p in named if p.default is p.empty and p.name not in OFFERED]
    if required:
        raise ValueError(f"parameters {', '.join(required)} are unknown; there are {', '.join(OFFERED)}")
    wanted = OFFERED if takes_all else tuple(p.name for p in named if p.name in OFFERED)
    return lambda call: function(**{name: getattr(call, name) for name in wanted})


def _explain(error: BaseException, folder: Path) -> str:
    """Return one line for people; the traceback goes to the log, where output has its bounds."""
    traceback.print_exception(error)
    return explain_exception(error, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
