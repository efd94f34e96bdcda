"""Following a run until it ends, and how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlboost_cli.runs.run_status import RunStatus, run_status
from rlboost_cli.runs.supervision import log_tail
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.index import is_supervised

if TYPE_CHECKING:
    from rlboost_cli.head.connection import Head

EVERY_S = 1.0
"""Between two looks: the coordinator counts its rates anew once a second."""
ABANDONED_S = 5.0
"""Without an answer and without a supervisor for this long, nobody will bring the run back by itself."""


def follow(run: RunFolder, every_s: float = EVERY_S) -> Iterator[RunStatus]:
    """Yield the run's status every `every_s` seconds; the last one yielded is of the ended run.

    Raises `RuntimeFault` once nothing runs it any more although it has not ended.
    """
    with contextlib.ExitStack() as stack:
        head = stack.enter_context(_head_of(run)) if run.head.exists() else None
        yield from _follow(run, every_s, head)


def _head_of(run: RunFolder) -> Head:
    from rlboost_cli.head.connection import Head

    return Head(run)


def _follow(run: RunFolder, every_s: float, head: Head | None) -> Iterator[RunStatus]:
    alone_since: float | None = None
    while True:
        status = run_status(run, head=head)
        yield status
        if status.has_ended:
            return
        if status.is_live or not status.is_reached or is_supervised(run):
            alone_since = None
        elif alone_since is None:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > ABANDONED_S:
            raise _abandoned(run)
        time.sleep(every_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: str
    problem: str
    remedy: str
    exit_code: int


def outcome_of(run: RunFolder) -> Outcome:
    """Return how the ended run ended."""
    data: dict[str, Any] = read_json(run.outcome) or {}
    state = str(data.get("state", "stopped"))
    exit_code = int(data.get("exit_code", 0 if state == "done" else 1))
    return Outcome(state, str(data.get("problem") or ""), str(data.get("remedy") or ""), exit_code)


def _abandoned(run: RunFolder) -> RuntimeFault:
    path = run.logs / "supervisor.log"
    return RuntimeFault(
        f"nothing runs {run.name} any more, though it has not ended; last lines of {path}:\n{log_tail(path)}",
        f"rlboost launch {run.name} goes on from its last checkpoint; rlboost down {run.name} ends it",
    )
