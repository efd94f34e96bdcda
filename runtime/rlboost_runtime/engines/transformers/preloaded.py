"""A process that has torch and transformers imported and forks engine children: `python -m ... SOCKET`.

For local machines that ask for it (`preload` of the job file): importing takes an engine many times as
long as the rest of its start, and on one computer each machine would do it again. Linux only.

Guarantees:

- a forked child carries the tag of its machine where others look for it, in the memory behind
  `/proc/PID/environ`, before it answers; so whoever kills the machine kills the child, too;
- it is in a session of its own, and ends when the agent's end of its socket is closed;
- this process computes nothing, so that no thread and no device is lost by the fork; it ends with its run.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import sys
import time
from pathlib import Path

from rlboost_runtime.engines.transformers import child
from rlboost_runtime.processes import RUN_TAG, tag_as_machine

LOOK_S = 1.0
"""Between two looks whether the run has ended."""
ASK_TIMEOUT_S = 60.0
"""For an answer: the first who asks waits for the imports."""
REACH_TIMEOUT_S = 5.0
"""Until the socket is there."""
_NUM_FDS = 2


class NoChild(Exception):
    """Nothing was forked; start a child the ordinary way."""


def ask(path: Path, machine: str, link_fd: int, log_fd: int) -> int:
    """Have a child forked that serves `link_fd` and writes to `log_fd`; return its pid. Raises `NoChild`."""
    try:
        with _reached(path) as sock:
            socket.send_fds(sock, [machine.encode()], [link_fd, log_fd])
            answer = sock.recv(32)
    except OSError as exc:
        raise NoChild from exc
    if not answer.isdigit():
        raise NoChild
    return int(answer)


def _reached(path: Path) -> socket.socket:
    deadline = time.monotonic() + REACH_TIMEOUT_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(ASK_TIMEOUT_S)
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return sock


def serve(path: Path, outcome: Path) -> None:
    """Import what engines need, then fork a child per request until `outcome` is there."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        child.import_engine()
        listener.settimeout(LOOK_S)
        while not outcome.exists():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            with sock:
                _answer(sock, listener)
    path.unlink(missing_ok=True)


def _answer(sock: socket.socket, listener: socket.socket) -> None:
    sock.settimeout(ASK_TIMEOUT_S)
    fds = array.array("i")
    try:
        machine, received, _, _ = socket.recv_fds(sock, 256, _NUM_FDS)
        fds.extend(received)
        if len(fds) == _NUM_FDS and os.fork() == 0:
            _become_child(machine.decode(), fds, sock, listener)
    except OSError:
        return  # who asked is gone, or starts a child itself
    finally:
        for fd in fds:
            os.close(fd)


def _become_child(machine: str, fds: array.array[int], sock: socket.socket, listener: socket.socket) -> None:
    """Serve the agent and never return."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tag_as_machine(machine)
        os.dup2(fds[1], 1)
        os.dup2(fds[1], 2)
        listener.close()
        sock.sendall(str(os.getpid()).encode())
        sock.close()
        child.main(fds[0], is_forked=True)
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    """Serve at the path that is the argument."""
    serve(Path(sys.argv[1]), Path(os.environ[RUN_TAG]) / "outcome.json")


if __name__ == "__main__":
    main()
