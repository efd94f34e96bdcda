"""SkyPilot's API server on this machine: who of us uses it, and its end together with all its processes.

SkyPilot leaves its server running for ever, and a server that is killed leaves its executors behind, which
hide their environment. Guarantees: a server that one of our children started ends once none of them lives,
however they ended, and it has neither clusters nor requests of anybody; if it is killed, what it leaves is
ended. One that we did not start is left alone. A server is known by its pid and start; its processes by its
session, which is theirs alone.

Loaded by `child` in SkyPilot's own Python, and run by it as a watcher: `python api_server.py FOLDER PID
START`. The standard library and psutil only, until SkyPilot has to be asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROJECT = "SKYPILOT_PROJECT_CONFIG"
"""Names a file of the run that its child serves. What outlives the run must not: without the file SkyPilot
does not even start, so that a watcher would wait for ever."""
LOOK_S = 3.0
"""Pause between two looks at whether the server is used."""
BUSY_S = 30.0
"""Pause after a look that found clusters or requests: each costs seconds of CPU."""
ASK_S = 60.0
"""Longest look; then SkyPilot hangs, and the watcher begins anew."""
_SAME_START_S = 2.0
_END_S = 10.0
_POLL_S = 0.05


class ServerUse:
    """One process's use of the server while it lives; `folder` is where SkyPilot keeps its state."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self.temporary = folder / ".rlboost-temporary"
        """Temporary files of the server and of SkyPilot in our children, which leave some: they go with the
        server."""
        self._lock = os.open(folder / ".rlboost-users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def join(self, timeout_s: float) -> None:
        """Be one of the users. Raises `TimeoutError` where somebody has long been about to end the server."""
        deadline = time.monotonic() + timeout_s
        while not self._take(fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise TimeoutError(f"SkyPilot's API server has been shutting down for {timeout_s:g} s")
            time.sleep(_POLL_S)
        self.temporary.mkdir(mode=0o700, exist_ok=True)

    def started(self, pid: int) -> None:
        """Have the server `pid`, which we started, watched by a process of its own, which outlives us."""
        start = psutil.Process(pid).create_time()
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._folder), str(pid), repr(start)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != PROJECT},
            cwd=self._folder,
            start_new_session=True,
        )

    def close(self) -> None:
        """Use it no more."""
        os.close(self._lock)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Keep others from joining; yields False, and keeps nobody, where somebody has joined."""
        is_alone = self._take(fcntl.LOCK_EX)
        try:
            yield is_alone
        finally:
            self._take(fcntl.LOCK_UN)

    def _take(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def watch(folder: Path, pid: int, start: float, is_idle: Callable[[], bool]) -> None:
    """Return once the server `pid`, started at `start` (Unix seconds), and all its processes have ended: by
    itself, or by us as soon as nobody uses it and `is_idle`."""
    use = ServerUse(folder)
    while _is_alive(pid, start):
        with use.alone() as is_alone:
            is_over = is_alone and is_idle()
            if is_over:
                end_session(pid, start)
                shutil.rmtree(use.temporary, ignore_errors=True)
        if not is_over:
            time.sleep(BUSY_S if is_alone else LOOK_S)
    end_session(pid, start)


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


def skypilot_is_idle() -> bool:
    """Return True if the API server has neither clusters nor requests, of anybody."""
    import sky
    from sky.server.requests.requests import RequestStatus

    under_way = {status.value for status in RequestStatus.active_statuses()}
    requests = [each for each in sky.api_status() if not each.request_id.endswith("-daemon")]
    if any(each.status in under_way for each in requests):
        return False
    return not sky.get(sky.status(all_users=True))


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


def _ask() -> bool:
    """Ask SkyPilot, and begin this process anew where it hangs or fails: the server is to be watched on."""
    command = [sys.executable, "-P", *sys.argv]
    anew = threading.Timer(ASK_S, os.execv, (sys.executable, command))
    anew.daemon = True
    anew.start()
    try:
        return skypilot_is_idle()
    except Exception:  # noqa: BLE001 the edge: SkyPilot raises what it likes; it is asked again
        return False
    finally:
        anew.cancel()


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), _ask)
