"""`python -m rlboost_runtime.coordinator RUN_FOLDER`: the coordinator of one run.

Exit status 0: the run has ended. 78: a restart would not help; problem and remedy are in the log. 75: the
disk refuses, which may pass. 74: it has refused for too long. Anything else: start it again, it goes on from
what is on disk.
"""

from __future__ import annotations

import logging
import sqlite3
import sys
from pathlib import Path

import uvloop

from rlboost_runtime.coordinator.driver import ingest as gc_tuning
from rlboost_runtime.coordinator.service import Coordinator, DiskPatienceOver, leaves
from rlboost_runtime.errors import DISK_ERRNOS, RLBoostError, RuntimeFault
from rlboost_runtime.logs import explain, setup
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.seams import SystemClock, SystemDisk

log = logging.getLogger(__name__)

EX_CONFIG = 78
"""A restart would not help."""
EX_IOERR = 74
"""The disk has refused for `service.DISK_PATIENCE_S`: the run is to end, so that it costs nothing more."""
EX_TEMPFAIL = 75
"""The disk takes no more, or fails: to be tried again, for as long as it takes."""


async def _serve(run: RunFolder) -> None:
    await Coordinator(run, read_resolved(run.job_json), SystemClock(), SystemDisk()).serve()


def main() -> int:
    """Serve until the run ends; return the process's exit status. Raises what cannot be explained."""
    setup("coordinator")
    run = RunFolder(Path(sys.argv[1]).absolute())
    if run.outcome.exists():
        return 0
    gc_tuning.relax()
    try:
        uvloop.run(_serve(run))
    except (RLBoostError, OSError, sqlite3.OperationalError, ExceptionGroup) as error:
        return exit_status(error, run.path)
    return 0


def exit_status(error: Exception, place: Path) -> int:
    """Explain in the log what ended a coordinator whose run lies in `place`; return its exit status.

    Raises `error` where it cannot be explained.
    """
    problems = list(leaves(error))
    if any(isinstance(problem, DiskPatienceOver) for problem in problems):
        return EX_IOERR
    disk = next((problem for problem in problems if _is_of_disk(problem)), None)
    if disk is not None:
        explain(log, RuntimeFault(f"the disk refuses: {disk}", f"free some space for {place}"))
        return EX_TEMPFAIL
    (first, *others) = problems
    if others or not isinstance(first, RLBoostError):
        raise error
    explain(log, first)
    return EX_CONFIG if first.exit_code == 2 else 1


def _is_of_disk(problem: Exception) -> bool:
    if isinstance(problem, OSError):
        return problem.errno in DISK_ERRNOS
    return isinstance(problem, sqlite3.OperationalError)


if __name__ == "__main__":
    sys.exit(main())
