"""Updating the local copies of runs whose head is elsewhere, before a command reads them.

Light: a run of this machine costs one look for a file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.index import all_runs, is_open

EVERY_S = 1.0
"""Shortest time between two requests of one command to a head."""
CLOUD_EVERY_S = 10.0
"""Shortest time between two requests to a cloud about a rented head."""
_ask_again_at: dict[Path, float] = {}


@contextlib.contextmanager
def looking_at(
    run: RunFolder, say: Callable[[str], None], *, ledger: bool = False, logs: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function that fetches what is new, over one connection; `say` is called once if the head is
    silent. For a run of this machine it does nothing."""
    if not run.head.exists():
        yield lambda: None
        return
    from rlboost_cli.head.connection import Head
    from rlboost_cli.head.mirror import refresh_if_elsewhere

    last_at, was_silent = -EVERY_S, False
    with Head(run) as head:

        def look() -> None:
            nonlocal last_at, was_silent
            if time.monotonic() - last_at < EVERY_S:
                return
            silence = refresh_if_elsewhere(run, ledger=ledger, logs=logs, head=head)
            if silence is not None and not was_silent:
                silence = asked_of_its_cloud(run, say, silence)
            if silence is not None and not was_silent:
                say(f"note: {silence}")
            last_at, was_silent = time.monotonic(), silence is not None

        if ledger and run.outcome.exists():
            asked_of_its_cloud(run, say, None)
        yield look


def asked_of_its_cloud(run: RunFolder, say: Callable[[str], None], silence: str | None) -> str | None:
    """Ask the cloud of a rented head for its state; return `silence`, or None if that shows the run ended."""
    if not run.head_machines.exists() or time.monotonic() < _ask_again_at.get(run.path, 0.0):
        return silence
    _ask_again_at[run.path] = time.monotonic() + CLOUD_EVERY_S
    from rlboost_cli.head.head_books import find_out

    try:
        find_out(run, say)
    except RLBoostError as error:
        say(f"note: the state of the head of {run.name} is unknown: {error.problem}")
    return None if run.outcome.exists() else silence


def look_at(run: RunFolder, say: Callable[[str], None], *, ledger: bool = False, logs: bool = False) -> None:
    """Fetch what is new, once."""
    with looking_at(run, say, ledger=ledger, logs=logs) as look:
        look()


def look_at_open(say: Callable[[str], None]) -> None:
    """Fetch what is new of every open run whose head is elsewhere, with what it has spent."""
    for run in all_runs():
        if run.head.exists() and is_open(run):
            look_at(run, say, ledger=True)
