"""The weight puller: fetches one weight version into a folder, as a child process of an agent.

::

    python -m rlboost_runtime.weights.pull.child

Reads a `PullRequest`, writes `PullProgress` at most five times a second, then a `PullReport`
(`weights.child_pipe`). A process of its own, so that neither TLS nor hashing can delay its agent's heartbeat.
Guarantees: see `weights.pull.pull`; it ends as soon as its stdin does, so it never outlives its agent, and
ending it so, or killing it, costs the next pull no more than the chunks in flight.
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
from rlboost_runtime.weights.child_pipe import (
    ChildFailure,
    PullProgress,
    PullReport,
    PullRequest,
    read_line,
    send,
)
from rlboost_runtime.weights.pull.pull import pull

REPORT_S = 0.2


def main() -> int:
    """Run one pull; returns the exit code."""
    stdin = sys.stdin.fileno()
    try:
        request = msgspec.json.decode(read_line(stdin), type=PullRequest)
        send(_pull_watching(request, stdin))
    except msgspec.DecodeError as exc:
        send(ChildFailure(f"the request on stdin cannot be read: {exc}"))
    except RLBoostError as exc:
        send(ChildFailure(str(exc)))
    except Exception as exc:  # noqa: BLE001 - process edge: the agent must learn why
        traceback.print_exc()
        send(ChildFailure(f"{type(exc).__name__}: {exc}"))
    else:
        return 0
    return 1


def _pull_watching(request: PullRequest, stdin: int) -> PullReport:
    """Pull in a thread; meanwhile report progress, and end the process with its stdin."""
    progress = PullProgress()
    woken, wake = os.pipe()

    def wake_up(_: Future[PullReport]) -> None:
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
                send(progress)
                next_report = time.monotonic() + REPORT_S
        return future.result()


if __name__ == "__main__":
    sys.exit(main())
