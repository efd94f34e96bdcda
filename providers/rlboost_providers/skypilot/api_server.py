"""SkyPilot's API server on this machine: who uses it, and its end together with all its processes.

SkyPilot leaves its server running for ever, and a server that is killed leaves its executors behind, which
hide their environment. Guarantees: a server that one of our children started ends with the last of them,
unless it still has clusters or requests, or was not started by us; what a killed server left is ended by the
next child. A server is known by its pid and start; its processes by its session, which is theirs alone.

Loaded by `child`, in SkyPilot's own Python: the standard library and psutil only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_SAME_START_S = 2.0
_END_S = 10.0
_POLL_S = 0.05


class ServerUse:
    """One child's use of the server; `folder` is where SkyPilot keeps its state."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mark = folder / "rlboost-server.json"
        self._lock = os.open(folder / ".rlboost-users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def join(self, timeout_s: float) -> None:
        """Be one of the users; end what a killed server left. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while not self._take(fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise TimeoutError(f"somebody has been ending SkyPilot's API server for {timeout_s:g} s")
            time.sleep(_POLL_S)
        marked = self._marked()
        if marked is not None and not _is_alive(*marked):
            end_session(marked[0], marked[1])
            self._mark.unlink(missing_ok=True)

    def started(self, pid: int) -> None:
        """Note that the server with `pid` was started by us."""
        with contextlib.suppress(psutil.Error):
            draft = self._mark.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps([pid, psutil.Process(pid).create_time()]))
            os.replace(draft, self._mark)

    def leave(self, is_idle: Callable[[], bool]) -> bool:
        """Use it no more; end it where it is ours, nobody else uses it and `is_idle`. Returns whether."""
        try:
            marked = self._marked()
            if marked is None or not self._take(fcntl.LOCK_EX) or not _is_alive(*marked) or not is_idle():
                return False
            end_session(*marked)
            self._mark.unlink(missing_ok=True)
            return True
        finally:
            os.close(self._lock)

    def _take(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _marked(self) -> tuple[int, float] | None:
        try:
            pid, start = json.loads(self._mark.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return int(pid), float(start)


def end_session(pid: int, start: float) -> None:
    """SIGKILL the session that the process `pid`, started at `start` (Unix seconds), has or had led."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if abs(psutil.Process(pid).create_time() - start) > _SAME_START_S:
            return  # the number is another's by now: the kernel gives it away once its session is empty
    deadline = time.monotonic() + _END_S
    while (members := list(_members(pid))) and time.monotonic() < deadline:
        for member in sorted(members, key=lambda each: each != pid):  # the leader first: it starts others
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(_POLL_S)


def _members(session: int) -> Iterator[int]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid


def _is_alive(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - start) <= _SAME_START_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
