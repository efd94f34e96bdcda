"""The process that plays episodes: `python -m rlboost_runtime.trainer.episodes.child SOCKET FOLDER`.

SOCKET is the number of an open socket to the trainer, FOLDER that of the open folder in which the endpoint's
socket lies. It plays many episodes at a time, in one event loop, and may be killed at any moment. What it
prints belongs to the user's code.

Protocol (`framing`): the trainer sends one pickled `EpisodeSetup`, then pickled
`EpisodeCall`s, or the number of an episode that is to end; the child answers with msgpack `Played`s. Nothing
from the child is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import resource
import socket
import sys
import traceback
from pathlib import Path

import httpx2
import msgspec

from rlboost_runtime.inference.episodes import SOCKET_NAME
from rlboost_runtime.protocol.episode_failures import EpisodeFailure
from rlboost_runtime.trainer.episodes.framing import framed, read
from rlboost_runtime.trainer.episodes.openenv import Unreachable, play_openenv
from rlboost_runtime.trainer.episodes.outcome import (
    LOADED,
    EpisodeCall,
    EpisodeSetup,
    Played,
)
from rlboost_runtime.trainer.episodes.play import (
    OwnTime,
    Play,
    Threads,
    is_limit,
    play_class,
    play_command,
    play_function,
)
from rlboost_runtime.trainer.rewards.child import import_callable, judge
from rlboost_runtime.trainer.rewards.outcome import explain_exception

NUM_THREADS = 256


def load(setup: EpisodeSetup, threads: Threads) -> Play:
    """Return how episodes are played. Raises whatever importing the user's file raises, or `ValueError`."""
    if setup.openenv is not None:
        return play_openenv(setup)
    if setup.python is None:
        return play_command(setup)
    found = import_callable(Path(setup.folder), setup.python)
    if inspect.isclass(found):
        return play_class(found, setup.max_turns, threads)
    if not inspect.iscoroutinefunction(found):
        raise ValueError(f"{setup.python} is neither a class nor an async function")
    if len(inspect.signature(found).parameters) != 2:
        raise ValueError(f"{setup.python} must have two parameters: client and row")
    return play_function(found)


class Player:
    """Plays episodes as they are asked for."""

    def __init__(self, setup: EpisodeSetup, play: Play, threads: Threads, folder: int) -> None:
        self._setup = setup
        self._play = play
        self._threads = threads
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._transport = httpx2.AsyncHTTPTransport(
            uds=f"/proc/self/fd/{folder}/{SOCKET_NAME}", limits=limits, retries=3
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, call: EpisodeCall, writer: asyncio.StreamWriter) -> None:
        """Play an episode; its end is written to `writer`."""

        async def run() -> None:
            played = await self._judged(call)
            write(writer, played)
            self._tasks.pop(call.number, None)

        self._tasks[call.number] = asyncio.create_task(run())

    def end(self, number: int) -> None:
        """End an episode that has taken too long."""
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    async def _judged(self, call: EpisodeCall) -> Played:
        folder, own_time = Path(self._setup.folder), OwnTime(self._setup.timeout_s)
        try:
            async with own_time:
                value = await self._play(call, own_time, self._transport)
        except (TimeoutError, asyncio.CancelledError) as error:
            if own_time.is_over or isinstance(error, asyncio.CancelledError):
                text = f"not over within environment.timeout_s {self._setup.timeout_s:g}"
                stuck = self._threads.are_busy
                return Played(call.number, None, EpisodeFailure.TIMEOUT, text, stuck)
            return self._raised(call, error, folder)
        except BaseException as error:  # noqa: BLE001 - the edge of the process: also SystemExit of the user's code
            return Played(call.number, 0.0) if is_limit(error) else self._raised(call, error, folder)
        if value is None:
            return Played(call.number)
        answers = [judge(each) for each in (value if isinstance(value, list | tuple) else [value])]
        for answer in answers:
            if answer.failure:
                return Played(call.number, None, EpisodeFailure.NO_NUMBER, answer.problem)
        rewards = tuple(answer.reward for answer in answers)
        return Played(call.number, sum(rewards), rewards=rewards if isinstance(value, list | tuple) else None)

    def _raised(self, call: EpisodeCall, error: BaseException, folder: Path) -> Played:
        traceback.print_exception(error)
        kind = EpisodeFailure.RAISED
        if isinstance(error, MemoryError):
            kind = EpisodeFailure.MEMORY
        elif isinstance(error, Unreachable):
            kind = EpisodeFailure.UNREACHABLE
        return Played(call.number, None, kind, explain_exception(error, folder))


def write(writer: asyncio.StreamWriter, played: Played) -> None:
    """Send an answer."""
    writer.write(framed(msgspec.msgpack.encode(played)))


async def serve(connection: socket.socket, folder: int) -> None:
    """Play until the trainer closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    setup: EpisodeSetup = pickle.loads(await read(reader))  # noqa: S301 - from our own parent
    threads = Threads(NUM_THREADS)
    try:
        if setup.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
        player = Player(setup, load(setup, threads), threads, folder)
    except BaseException as error:  # noqa: BLE001 - the edge of the process: a user's module may raise anything
        traceback.print_exception(error)
        write(writer, Played(LOADED, None, "load", explain_exception(error, Path(setup.folder))))
        await writer.drain()
        return
    write(writer, Played(LOADED))
    while True:
        asked = pickle.loads(await read(reader))  # noqa: S301 - from our own parent
        if isinstance(asked, int):
            player.end(asked)
        else:
            player.start(asked, writer)


def main(arguments: list[str]) -> None:
    """Serve the socket that the arguments name."""
    connection, folder = map(int, arguments)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the trainer has ended
        asyncio.run(serve(socket.socket(fileno=connection), folder))


if __name__ == "__main__":
    main(sys.argv[1:])
