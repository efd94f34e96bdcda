"""The weight puller: fetches one weight version into a folder, as a child process of an agent.

::

    python -m rlboost_runtime.weights.pull.child     reads one JSON line, a `PullRequest`, on stdin

    {"bytes", "total", "moved"}                  on stdout, at most five a second (`PullProgress`)
    {"done": true, "folder", "pulled_bytes", "seconds", "num_corrupt", "how", "full_bytes", "bytes_per_s",
     "by_holder", "complaints"}                  at the end, exit code 0; see `pull.Pulled`
    {"error": "..."}                             or this, exit code 1

A process of its own, so that neither TLS nor hashing can delay its agent's heartbeat. Guarantees: see
`weights.pull`; it ends as soon as its stdin does, so it never outlives its agent, and being ended so, or
killed, costs the next pull no more than the chunks in flight.
"""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.weights.pull.chunk_scheduler import PullProgress
from rlboost_runtime.weights.pull.pull import Pulled, PullRequest, pull

REPORT_S = 0.2
MAX_REQUEST_BYTES = 1024 * 1024


def main() -> int:
    """Run one pull; returns the exit code."""
    stdin = sys.stdin.fileno()
    try:
        request = msgspec.json.decode(read_line(stdin), type=PullRequest)
    except msgspec.DecodeError as exc:
        say({"error": f"the request on stdin cannot be read: {exc}"})
        return 1
    started = time.monotonic()
    try:
        pulled = _pull_watching(request, stdin)
    except RLBoostError as exc:
        say({"error": str(exc)})
        return 1
    except Exception as exc:  # noqa: BLE001 - process edge: the agent must learn why
        traceback.print_exc()
        say({"error": f"{type(exc).__name__}: {exc}"})
        return 1
    say(
        {
            "done": True,
            "folder": str(pulled.folder),
            "pulled_bytes": pulled.pulled_bytes,
            "seconds": round(time.monotonic() - started, 6),
            "num_corrupt": pulled.num_corrupt,
            "how": pulled.how,
            "full_bytes": pulled.full_bytes,
            "bytes_per_s": round(pulled.pulled_bytes / pulled.fetch_s) if pulled.fetch_s else 0,
            "by_holder": pulled.by_holder,
            "complaints": pulled.complaints,
        }
    )
    return 0


def _pull_watching(request: PullRequest, stdin: int) -> Pulled:
    """Pull in a thread; meanwhile report, and end the process with its stdin."""
    progress = PullProgress()
    woken, wake = os.pipe()

    def wake_up(_: Future[Pulled]) -> None:
        os.write(wake, b"\0")

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(pull, request, progress)
        future.add_done_callback(wake_up)
        next_report = time.monotonic() + REPORT_S
        while not future.done():
            ready, _, _ = select.select([stdin, woken], [], [], max(0.0, next_report - time.monotonic()))
            if stdin in ready and not os.read(stdin, 4096):
                os._exit(1)  # as good as SIGKILL, and what is on disk is made for that
            if time.monotonic() >= next_report:
                report = {"bytes": progress.done_bytes, "total": progress.total_bytes}
                say({**report, "moved": progress.moved_bytes})
                next_report = time.monotonic() + REPORT_S
        return future.result()


def read_line(fd: int) -> bytes:
    """Return the first line, unbuffered: what follows it is for `select`."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_REQUEST_BYTES:
        data = os.read(fd, 65536)
        if not data:
            break
        line += data
    return line


def say(message: dict[str, object]) -> None:
    """Write a line for the agent; one that is gone needs none."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
