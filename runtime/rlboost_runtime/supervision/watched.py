"""A process that the supervisor watches: one that it started, or one adopted from its predecessor.

Its end is seen at once through a pidfd; where the system has none, within a second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlboost_runtime.logs import event
from rlboost_runtime.process_tags import await_tags, identify, tags, untagged
from rlboost_runtime.run_folder import RunFolder, read_json, write_json
from rlboost_runtime.supervision.roles import Role

log = logging.getLogger(__name__)

_POLL_S = 1.0  # without pidfd


@dataclass(slots=True)
class Watched:
    """A living process. `started_at` in seconds since the Unix epoch; `child` None: adopted."""

    pid: int
    started_at: float
    run: Path
    child: subprocess.Popen[bytes] | None
    began: float
    """Its start on this process's monotonic clock: `started_at` may be off by a second."""
    log_offset: int = 0
    """Where its output begins in its log, in bytes; 0 where unknown."""

    async def wait(self) -> int | None:
        """Return its exit status once it has ended, negative for a signal; None where nobody can tell."""
        try:
            fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        except ProcessLookupError:
            return self._status()
        if fd is None:
            await self._poll()
        else:
            try:
                if self._lives():  # else the descriptor may be another process's
                    await _readable(fd)
            finally:
                os.close(fd)
        return self._status()

    def _lives(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None
        return identify(self.pid, self.started_at, self.run) is not None

    def _status(self) -> int | None:
        return None if self.child is None else self.child.wait()

    async def _poll(self) -> None:
        while self._lives():  # noqa: ASYNC110 no system call says so
            await asyncio.sleep(_POLL_S)


def start(role: Role, run: RunFolder) -> Watched:
    """Start `role` in a session of its own, tagged, its output appended to its log; write who it is.

    On a full disk that cannot be written: the process then works, but a later supervisor replaces it.
    """
    role.prepare()
    path = role.log(run)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = untagged(os.environ) | tags(run.path, machine=role.machine, role=role.name)
    began = time.monotonic()
    with path.open("ab") as output:
        log_offset = output.tell()
        child = subprocess.Popen(
            role.command,
            cwd=run.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    await_tags(child.pid)
    process = Watched(child.pid, psutil.Process(child.pid).create_time(), run.path, child, began, log_offset)
    try:
        write_identity(role.identity(run), process.pid, process.started_at)
    except OSError as problem:
        event(log, "identity.not_written", level=logging.WARNING, process=role.name, problem=str(problem))
    return process


def adopt(role: Role, run: RunFolder) -> Watched | None:
    """Return the process of `role` that an earlier supervisor started, if it lives."""
    known = read_json(role.identity(run))
    if known is None:
        return None
    process = identify(known["pid"], known["started_at"], run.path)
    if process is None:
        return None
    began = time.monotonic() - max(0.0, time.time() - known["started_at"])
    return Watched(process.pid, known["started_at"], run.path, None, began)


def write_identity(path: Path, pid: int, started_at: float) -> None:
    """Say in `path` which process it is; `started_at` tells it from a later one of the same number."""
    write_json(path, {"pid": pid, "started_at": started_at})


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
