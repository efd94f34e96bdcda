"""A process that the supervisor watches: one that it started, or one adopted from its predecessor.

Its end is seen at once through a pidfd; where the system has none, within a second. `Attempts` decides, as a
pure value, when to start a role again and when to give up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from rlboost_runtime.logs import event
from rlboost_runtime.processes import (
    identify,
    process_age,
    process_start,
    start_session,
    tags,
    temporary_folder,
    untagged,
)
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.supervisor.roles import Role

log = logging.getLogger(__name__)

_POLL_S = 1.0  # without pidfd


@dataclass(slots=True)
class Watched:
    """A living process. `start`: `processes.process_start`; `child` None: adopted."""

    pid: int
    start: float
    run: Path
    child: subprocess.Popen[bytes] | None
    began: float
    """Its start on this process's monotonic clock."""
    log_offset: int = 0
    """Where its output begins in its log, in bytes; 0 where unknown."""

    async def wait(self) -> int | None:
        """Return its exit status once it has ended, negative for a signal; None if it is unknown."""
        try:
            fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        except ProcessLookupError:
            return self._status()
        if fd is None:
            await self._poll()
        else:
            try:
                if self._lives():  # otherwise the descriptor may be another process's
                    await _readable(fd)
            finally:
                os.close(fd)
        return self._status()

    def _lives(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None
        return identify(self.pid, self.start, self.run) is not None

    def _status(self) -> int | None:
        return None if self.child is None else self.child.wait()

    async def _poll(self) -> None:
        while self._lives():  # noqa: ASYNC110 no system call says so
            await asyncio.sleep(_POLL_S)


def start(role: Role, run: RunFolder) -> Watched:
    """Start `role` in a session of its own, tagged, its output appended to its log; record its identity.

    On a full disk the identity is not written: the process works, but a later supervisor replaces it; and its
    temporary files are the system's.
    """
    role.prepare()
    path = role.log(run)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = untagged(os.environ) | tags(run.path, machine=role.machine, role=role.name)
    try:
        environment["TMPDIR"] = str(temporary_folder(run.path))
    except OSError as problem:
        event(
            log, "temporary_folder.not_made", level=logging.WARNING, process=role.name, problem=str(problem)
        )
    began = time.monotonic()
    log_offset = path.stat().st_size if path.exists() else 0
    child = start_session(role.command, environment, run.path, path)
    process = Watched(child.pid, process_start(child.pid), run.path, child, began, log_offset)
    try:
        write_identity(role.identity(run), process.pid, process.start)
    except OSError as problem:
        event(log, "identity.not_written", level=logging.WARNING, process=role.name, problem=str(problem))
    return process


def adopt(role: Role, run: RunFolder) -> Watched | None:
    """Return the process of `role` that an earlier supervisor started, if it lives."""
    known = read_json(role.identity(run))
    if known is None:
        return None
    process = identify(known["pid"], known["start"], run.path)
    if process is None:
        return None
    began = time.monotonic() - process_age(known["start"])
    return Watched(process.pid, known["start"], run.path, None, began)


def write_identity(path: Path, pid: int, start: float) -> None:
    """Record in `path` which process it is; `start` (`processes.process_start`) tells it from a later one
    of the same number."""
    write_json(path, {"pid": pid, "start": start})


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


EX_CONFIG = 78
"""sysexits.h: exit status of a role that a restart would not help."""
EX_TEMPFAIL = 75
"""sysexits.h: exit status of a role whose machine's disk fails, which is not its fault and may pass."""
EX_IOERR = 74
"""sysexits.h: exit status of a role whose disk has refused for longer than is worth waiting."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times in seconds."""

    backoff_s: float = 0.2
    """Pause before the first restart; doubled for each further one."""
    backoff_limit_s: float = 10.0
    """Longest pause; also the one after a role ended of its own accord (exit status 0)."""
    healthy_after_s: float = 30.0
    """After a process that lived this long, or in whose life there was progress, pauses start small again."""
    crashes: int = 6
    """Crashes in a row without progress after which the run has failed."""
    kills: int = 20
    """SIGKILLs in a row without progress after which the run has failed. One is always sent by something else
    and says nothing about the role; so many mean that this machine has no room for it (out of memory), and
    that going on only costs money. With the pauses between them they take three minutes at least."""
    disk_patience_s: float = 900.0
    """Time without progress for which a role that the disk refuses is started again before the run has
    failed: time to make room, without paying for an idle fleet until the morning."""
    look_s: float = 0.2
    """Time between two looks for files that other processes write."""
    grace_s: float = 5.0
    """Time between SIGTERM and SIGKILL at the end."""
    stop_timeout_s: float = 30.0
    """How long the coordinator gets to end a failed run in order before that is done for it."""


@dataclass(slots=True)
class Attempts:
    """The processes of one role so far. `measures_progress`: by its work alone, not by its lifetime.

    A crash is an end that counts against the role itself: not status 0, `EX_TEMPFAIL` or SIGKILL, which is
    always sent by something else; the latter two have bounds of their own.
    """

    tuning: Tuning
    measures_progress: bool
    progress: int = 0
    restarts: int = 0
    crashes: int = 0
    kills: int = 0
    refused_s: float = 0.0
    """Time since the disk began to refuse."""

    def ended(self, status: int | None, lived_s: float, progress: int) -> float:
        """Record the end of a process; return the pause before the next, in seconds."""
        healthy = lived_s >= self.tuning.healthy_after_s
        if progress != self.progress or (healthy and not self.measures_progress):
            self.crashes = self.kills = self.restarts = 0
            self.refused_s = 0.0
        if healthy:
            self.restarts = 0
        self.progress = progress
        self.restarts += 1
        pause_s = self._pause_s(status)
        if status == EX_TEMPFAIL:
            self.refused_s += lived_s + pause_s
        elif status == -signal.SIGKILL:
            self.kills += 1
        else:
            self.crashes += status != 0
        return pause_s

    def _pause_s(self, status: int | None) -> float:
        if status == 0:
            return self.tuning.backoff_limit_s
        exponent = min(self.restarts - 1, 30)  # far beyond any limit, and no overflow
        return float(min(self.tuning.backoff_s * 2**exponent, self.tuning.backoff_limit_s))

    def is_hopeless(self, status: int | None) -> bool:
        """Return True if another restart would not help after a process that ended with `status`."""
        return (
            status in (EX_CONFIG, EX_IOERR)
            or self.crashes >= self.tuning.crashes
            or self.kills >= self.tuning.kills
            or self.refused_s >= self.tuning.disk_patience_s
        )
