"""`python -m rlboost_runtime.engines.vllm.keeper`: keeps a vLLM server and all that it starts together.

A vLLM server is several processes, and killing one of them leaves others as orphans that hold the GPU. The
keeper leads their session: when the server ends, or the agent goes (stdin closes), or the keeper is told to
end, everything in its process group is killed. SIGTERM is passed on to the server first, which may then still
end its streams.

The first line of stdin is a JSON object: `command` and `environment` of the server. Standard library only; it
waits without polling.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys

TERM_GRACE_S = 3.0
"""Time the server gets to end after SIGTERM: it takes half a second."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the server until it ends or the parent goes; then kill the process group, ourselves included."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it arrives through the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = sys.stdin.fileno()
    order = json.loads(_read_line(stdin))
    with subprocess.Popen(  # the preexec function makes one system call
        order["command"],
        env=order["environment"],
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    ) as server:
        ended = os.pidfd_open(server.pid)
        ready, _, _ = select.select([ended, woken, stdin], [], [])
        if woken in ready and ended not in ready:
            server.terminate()
            select.select([ended, stdin], [], [], TERM_GRACE_S)
        os.write(2, f"the server ended with {server.poll()}; ending what is left of it\n".encode())
        os.killpg(0, signal.SIGKILL)


def _read_line(fd: int) -> bytes:
    """Return the first line, unbuffered: what follows it is for `select`."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 65536)
        if not data:
            sys.exit(0)  # the parent ended before it sent anything
        line += data
    return line


def _die_with_parent() -> None:
    """Let the kernel kill the server should the keeper be killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
