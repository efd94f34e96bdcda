"""The trainer's side of a process that plays episodes (`child`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.protocol.episode_failures import EpisodeFailure
from rlboost_runtime.trainer.episodes.framing import framed, read
from rlboost_runtime.trainer.episodes.outcome import (
    LOADED,
    EpisodeCall,
    EpisodeSetup,
    Played,
)
from rlboost_runtime.trainer.episodes.taskset import CHILD
from rlboost_runtime.trainer.rewards.pool import (
    LOAD_TIMEOUT_S,
    OUTPUT_LIMIT_BYTES,
    child_environment,
)
from rlboost_runtime.trainer.rewards.sandbox import Sandbox

_of_ours = msgspec.msgpack.Decoder(Played).decode
_of_foreign = msgspec.json.Decoder(Played).decode


class EpisodeProcess:
    """One process. It belongs to one event loop."""

    def __init__(self, setup: EpisodeSetup, sockets: Path, log_file: Path, sandbox: Sandbox) -> None:
        self._setup = setup
        self._sockets = sockets
        self._log_file = log_file
        self._sandbox = sandbox
        self._decode = _of_ours
        if setup.taskset is not None:
            self._sandbox = replace(sandbox, program=setup.taskset.python, folders=(setup.taskset.tokenizer,))
            self._decode = _of_foreign
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[str, asyncio.Future[Played]]] = {}
        self._next = 0
        self._hung = False
        self.is_retired = False
        """It gets no more episodes and ends with its last."""

    @property
    def num_open(self) -> int:
        """Episodes that it plays."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """True while episodes may be given to it."""
        return self._reading is not None and not self._reading.done() and not self.is_retired

    async def start(self) -> None:
        """Start it and let it load the environment. Raises `ConfigError`."""
        ours, theirs = socket.socketpair()
        self._sockets.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(self._sockets, os.O_PATH | os.O_DIRECTORY)
        command, environment = self._program()
        command += [str(theirs.fileno()), str(folder)]
        command, environment = self._sandbox.around(command, Path(self._setup.folder), environment)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, pass_fds=[theirs.fileno(), folder],
                start_new_session=True, env=environment,
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(folder)
        assert self._process.stdout is not None
        self._printing = asyncio.create_task(_keep_output(self._process.stdout, self._log_file))
        reader, self._writer = await asyncio.open_connection(sock=ours)
        await self._load(reader)
        self._reading = asyncio.create_task(self._read(reader))

    def _program(self) -> tuple[list[str], dict[str, str]]:
        ours = child_environment()
        if self._setup.taskset is None:
            return [sys.executable, "-P", "-m", "rlboost_runtime.trainer.episodes.child"], ours
        del ours["PYTHONPATH"]  # its Python has packages of its own
        return [self._setup.taskset.python, "-P", str(CHILD)], ours

    async def _load(self, reader: asyncio.StreamReader) -> None:
        name = self._setup.name
        try:
            self._send(self._setup)
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                loaded = self._decode(await read(reader))
        except (EOFError, OSError, asyncio.IncompleteReadError) as error:
            await self.kill()
            raise ConfigError(
                f"environment: {name} could not be loaded: its process ended or hung ({error!r})",
                f"importing the file must return within {LOAD_TIMEOUT_S:g} s; what it printed is in"
                f" {self._log_file.name}",
            ) from error
        assert loaded.number == LOADED
        if loaded.failure:
            await self.kill()
            raise ConfigError(
                f"environment: {name} cannot be loaded: {loaded.problem.strip()}",
                "fix the file and try again",
            )

    async def play(self, call: EpisodeCall) -> Played:
        """Return how an episode ended. Never raises, but for being cancelled, which ends the episode."""
        number, self._next = self._next, self._next + 1
        done: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        self._waiting[number] = call.name, done
        try:
            self._send(replace(call, number=number))
            return await done
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            text = f"the row cannot be sent to its process: {error!r:.200}"
            return Played(number, None, EpisodeFailure.RAISED, text)
        except (OSError, RuntimeError) as error:
            num = len(self._waiting)
            return Played(number, None, EpisodeFailure.DIED, f"its process ended: {error}", num_ended=num)
        finally:
            self._waiting.pop(number, None)
            if not done.done():
                with contextlib.suppress(OSError, RuntimeError):
                    self._send(number)

    def end(self, name: str) -> None:
        """Have it end an episode that takes too long."""
        for number, (known, _) in self._waiting.items():
            if known == name:
                self._send(number)

    async def kill(self, *, hung: bool = False) -> None:
        """End the process and everything in its session. `hung`: it does not end an episode that has taken
        too long."""
        self._hung = self._hung or hung
        process, self._process = self._process, None
        if self._writer is not None:
            self._writer.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await self._printing
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    def _send(self, what: EpisodeSetup | EpisodeCall | int) -> None:
        assert self._writer is not None
        data = pickle.dumps(what) if self._setup.taskset is None else _as_json(what, self._setup)
        if self._writer.is_closing():
            raise ConnectionResetError("its connection is closed")
        self._writer.write(framed(data))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                played = self._decode(await read(reader))
                _, done = self._waiting.get(played.number, ("", None))
                if done is not None and not done.done():
                    done.set_result(played)
                self.is_retired |= played.is_stuck
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            pass
        finally:
            open_now = [(number, done) for number, (_, done) in self._waiting.items() if not done.done()]
            for number, done in open_now:
                done.set_result(self._died(number, len(open_now)))

    def _died(self, number: int, num_ended: int) -> Played:
        """Return how an episode ended with its process."""
        if self._hung:
            text = f"not over within environment.timeout_s {self._setup.timeout_s:g}, and it hangs"
            return Played(number, None, EpisodeFailure.TIMEOUT, text, num_ended=num_ended)
        return Played(number, None, EpisodeFailure.DIED, "its process ended", num_ended=num_ended)


async def _keep_output(stream: asyncio.StreamReader, path: Path) -> None:
    """Append the first bytes of what a process prints to `path`; read and drop the rest."""
    left = OUTPUT_LIMIT_BYTES
    with path.open("ab") as file:
        while part := await stream.read(65536):
            file.write(part[:left])
            file.flush()
            left = max(0, left - len(part))


def _as_json(what: EpisodeSetup | EpisodeCall | int, setup: EpisodeSetup) -> bytes:
    """Return a message to a process that has none of our packages."""
    found: Any = what  # JSON
    if isinstance(what, EpisodeSetup):
        assert what.taskset is not None
        limits = {
            "max_turns": what.max_turns, "timeout_s": what.timeout_s, "memory_bytes": what.memory_bytes
        }  # fmt: skip
        found = what.taskset.told | limits
    elif isinstance(what, EpisodeCall):
        assert setup.taskset is not None
        renderer = dict(setup.taskset.told["renderer"])
        if renderer.get("name") == "default":
            renderer = what.template_args | renderer
            if what.template is not None:
                renderer.setdefault("chat_template", what.template)
        found = {
            "number": what.number, "name": what.name, "key": what.key, "row": what.row, "renderer": renderer
        }  # fmt: skip
    return json.dumps(found).encode()
