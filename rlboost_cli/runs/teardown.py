"""Ending a run for certain: ask its coordinator, then end whatever is left, then look again.

Guarantees once `end_run` returns: no process of the run lives on this machine, no provider at which it was
about to launch one lists a machine of it, its ledger has no open machine, and its outcome is written. Doing
it again changes nothing. Where a cloud does not answer, the error names what may still cost money.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from rlboost_cli.runs import client
from rlboost_cli.terminal.text import left_lines
from rlboost_runtime.billing.books import close_books, unsettled
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.processes import end_all, tagged
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.create import kept, stored_job
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.index import is_supervised

GRACEFUL_S = 30.0
"""Longest time in which the coordinator saves, ends its machines and notes how the run ended."""
TERM_GRACE_S = 5.0
"""Longest time in which a process ends after SIGTERM: whatever matters has been saved by then."""

_POLL_S = 0.1
_EXIT_S = 2.0  # between a supervisor's outcome and its exit


@dataclass(frozen=True, slots=True)
class Teardown:
    """What it took to end the run."""

    processes: tuple[int, ...] = ()
    machines: tuple[str, ...] = ()
    """Processes and machines that were left after the coordinator had ended, and were ended."""


def end_run(run: RunFolder, progress: Callable[[str], None]) -> Teardown:
    """End the run; blocks for up to about a minute, while a cloud does not answer for some minutes.

    Raises `RuntimeFault` where something cannot be ended, `ProviderError` where a cloud cannot be asked, and
    of a head elsewhere what `head.control.end_run` does.
    """
    if run.head.exists():
        from rlboost_cli.head import control

        control.end_run(run, progress)
        _note_stopped(run)
        return Teardown()
    return _end_here(run, progress)


def end_without_head(run: RunFolder, progress: Callable[[str], None]) -> Teardown:
    """End what the lost head of a run has launched, as far as this machine can reach it, and close the books.
    Raises like `end_run`."""
    from rlboost_cli.head.head_books import learn_intents, settle
    from rlboost_cli.head.mirror import close_mirror
    from rlboost_cli.head.renting import give_back

    if run.head_machines.exists():
        give_back(run, progress)
    learn_intents(run)
    ended = _end_here(run, progress)
    close_mirror(run)
    settle(run)
    return ended


def _end_here(run: RunFolder, progress: Callable[[str], None]) -> Teardown:
    _ask_coordinator(run, progress)
    progress(f"ending the processes of {run.name} that are left")
    from rlboost_runtime.supervisor.machines import end_machines

    processes = end_all(run.path, TERM_GRACE_S)
    in_memory.free_run(run)
    progress(f"ending the machines of {run.name} that are left")
    try:
        with _its_environment(run):
            ended = end_machines(stored_job(run), run, progress)
    except RLBoostError as error:
        raise _naming_machines(run, error) from error
    close_books(run, ended.views, "ended by rlboost down")
    _note_stopped(run)
    return Teardown(tuple(processes), ended.machines)


@contextlib.contextmanager
def _its_environment(run: RunFolder) -> Iterator[None]:
    """Have the keys of clouds that the run was given: on a head elsewhere nobody else has any."""
    before = dict(os.environ)
    os.environ.update(kept(run))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _naming_machines(run: RunFolder, error: RLBoostError) -> RLBoostError:
    """Return `error` with the machines that may still cost money, and what to do about them."""
    left = left_lines(unsettled(run))
    if not left:
        return error
    lines = "\n".join(f"  {line}" for line in left)
    fuller = RLBoostError(
        f"{error.problem}\nmay still cost money:\n{lines}",
        f"{error.remedy}; then type rlboost down {run.name}",
    )
    fuller.exit_code = error.exit_code
    return fuller


def _note_stopped(run: RunFolder) -> None:
    if not run.outcome.exists():
        write_json(run.outcome, {**client.stopped_outcome(run), "exit_code": 0})


def _ask_coordinator(run: RunFolder, progress: Callable[[str], None]) -> None:
    """Ask it to end the run, and wait until it has, or for `GRACEFUL_S`."""
    if not run.outcome.exists():
        try:
            client.stop(run)
        except client.NotAnswering:
            return
        progress(f"waiting until the coordinator of {run.name} has ended its machines")
    deadline = time.monotonic() + GRACEFUL_S
    while time.monotonic() < deadline:
        if run.outcome.exists() and not is_supervised(run):
            psutil.wait_procs(tagged(run.path), timeout=_EXIT_S)
            return
        time.sleep(_POLL_S)
