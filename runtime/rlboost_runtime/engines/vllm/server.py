"""One vLLM server as a child of the agent: started, waited for, timed, and ended with all that it started.

It listens on a Unix socket in a fresh folder of mode 700 and requires a random key: no other user of the
machine, and nobody outside it, reaches its admin interface. Its keeper (`keeper`) leads a session of its own,
so that no process of the server outlives another, or us.

Guarantees of the folder of its socket: only this user can enter it; its path is short, as the paths of Unix
sockets must be (107 bytes); folders of servers that were killed together with their agent are removed when a
folder is made an hour later, those of servers that live or are starting never.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rlboost_runtime.engines.base import EngineDied, EngineSpec
from rlboost_runtime.engines.vllm import command
from rlboost_runtime.engines.vllm.api import VllmApi
from rlboost_runtime.logs import event
from rlboost_runtime.run.engine_python import EnginePython

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How often a starting server is checked."""
STOP_GRACE_S = 3.5
"""Time that the keeper gets to end the server before everything is killed."""
FIRST_REPORT_S = 10.0
"""A start that takes longer is reported, then every so many seconds."""
_LOADED = re.compile(r"Loading weights took ([0-9.]+) seconds")
_COMPILED = re.compile(r"torch\.compile (?:took|and initial profiling.*took) ([0-9.]+) s")
_INITIALISED = re.compile(r"init engine \(.*?\) took ([0-9.]+) s")
_TAIL_BYTES = 20_000


class VllmServer:
    """A server for the model in `folder`; started once."""

    def __init__(self, spec: EngineSpec, python: EnginePython, folder: Path) -> None:
        self._spec = spec
        self._python = python
        self._folder = folder
        self._home = make_socket_folder()
        self._socket = self._home / SOCKET
        self._key = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self.api = VllmApi(self._socket, self._key)
        self.flags = command.flags(spec, python.is_cpu, folder, self._socket)
        self.phases_s: dict[str, float] = {}
        """Seconds of the start, by phase; known once `start` returned."""

    @property
    def pid(self) -> int | None:
        """The keeper's process id, which is also that of the session and group of all its processes."""
        return None if self._process is None else self._process.pid

    @property
    def endpoint(self) -> tuple[Path, str]:
        """The socket and the key."""
        return self._socket, self._key

    @property
    def activity(self) -> int:
        """A number that grows while the server is starting: the size of its log."""
        with suppress(OSError):
            return self._spec.log.stat().st_size
        return 0

    def has_flag(self, name: str) -> bool:
        """Return True if the server was started with this option, and knows it."""
        return any(flag[0] == name for flag in self.flags)

    async def start(self, timeout_s: float) -> None:
        """Start and wait until it answers, leaving out options that this vLLM does not know.

        Raises `EngineDied`.
        """
        deadline = time.monotonic() + timeout_s
        while not await self._try_start(deadline):
            unknown = command.unknown_flags(self._log_text())
            known = [flag for flag in self.flags if flag[0] not in unknown]
            if wrong := sorted(
                name
                for name in self._spec.vllm.args
                if {command.option(name), command.option(name, is_on=False)} & unknown
            ):
                raise self._failure(f"rollout.vllm_args: this vLLM does not know {', '.join(wrong)}")
            if len(known) == len(self.flags):
                raise self._failure("the server ended while it started")
            event(log, "engine.flags_unknown", level=logging.WARNING, flags=sorted(unknown))
            self.flags = known

    async def ended(self) -> None:
        """Return once the server, or its keeper, is gone."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        """End every process of the server; idempotent."""
        await self.api.close()
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await process.wait()
            except TimeoutError:
                event(log, "engine.killed", level=logging.WARNING, pid=process.pid)
        await self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    # --- helpers ------------------------------------------------------------------------------------------

    async def _try_start(self, deadline: float) -> bool:
        """Return True once the server answers, False if it ended by itself."""
        began = time.monotonic()
        self._process = await self._spawn()
        next_report = began + FIRST_REPORT_S
        while time.monotonic() < deadline:
            if self._process.returncode is not None:
                return False
            if self._socket.exists() and await self.api.is_healthy():
                self._time_phases(time.monotonic() - began)
                return True
            if time.monotonic() >= next_report:
                event(log, "engine.starting", seconds=round(time.monotonic() - began, 1))
                next_report += FIRST_REPORT_S
            await asyncio.sleep(POLL_S)
        await self.kill()
        raise self._failure("the server was not ready in time")

    async def _spawn(self) -> asyncio.subprocess.Process:
        order = {
            "command": command.command(self._python, self.flags),
            "environment": command.environment(
                os.environ, self._spec, self._python.is_cpu, self._key, _compile_cache()
            ),
        }
        with self._spec.log.open("ab") as log_file:
            self._log_start = log_file.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rlboost_runtime.engines.vllm.keeper"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")  # the key is in it: not for the command line
        return process

    async def kill(self) -> None:
        """Kill what the keeper leads at once, also where the keeper is gone already."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def _time_phases(self, total_s: float) -> None:
        text = self._log_text()
        found = {
            "load": _LOADED.search(text),
            "compile": _COMPILED.search(text),
            "init": _INITIALISED.search(text),
        }
        phases = {name: float(match[1]) for name, match in found.items() if match is not None}
        if "init" in phases:
            phases["init"] = max(0.0, phases["init"] - phases.get("compile", 0.0))  # the latter is part of it
        phases["imports"] = max(0.0, total_s - sum(phases.values()))
        self.phases_s = {name: round(seconds, 3) for name, seconds in phases.items()}

    def _log_text(self) -> str:
        """Return what this server wrote to the log, its end where that is long."""
        with self._spec.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - 10 * _TAIL_BYTES))
            return file.read().decode(errors="replace")

    def _failure(self, problem: str) -> EngineDied:
        wrong = [line for line in self._log_text()[-_TAIL_BYTES:].splitlines() if "Error" in line]
        detail = f": {wrong[-1][-300:]}" if wrong else ""
        return EngineDied(problem + detail, f"see {self._spec.log}")


async def fp8_problem() -> str | None:
    """Return why this machine's GPUs cannot serve fp8; None if they can."""
    query = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    try:
        process = await asyncio.create_subprocess_exec(*query, stdout=asyncio.subprocess.PIPE)
    except OSError:
        return "fp8 needs a GPU of compute capability 8.9, and nvidia-smi is not here to read this one's"
    output, _ = await process.communicate()
    return command.fp8_refusal(output.decode())


def _compile_cache() -> Path:
    """Return where compiled graphs stay from one start to the next, of this run and others."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlboost" / "vllm"


SOCKET = "s"
PREFIX = "rlboost-vllm-"
FORGOTTEN_S = 3600.0
"""Age from which a folder without a listener belongs to no server that is still starting: vLLM binds its
socket long before it listens."""
_CONNECT_TIMEOUT_S = 1.0


def make_socket_folder() -> Path:
    """Make a new folder of mode 700, after removing those that are no longer used."""
    remove_stale(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def remove_stale(parent: Path) -> None:
    """Remove the folders below `parent` whose server is gone; others' folders cannot be, and stay."""
    for folder in parent.glob(f"{PREFIX}*"):
        if _is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > FORGOTTEN_S and not _has_listener(folder)
    except OSError:
        return False


def _has_listener(folder: Path) -> bool:
    """Return True if a server lives: the kernel refuses connections to a socket whose owner is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(folder / SOCKET))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # busy, or not ours
    return True
