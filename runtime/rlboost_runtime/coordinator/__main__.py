"""`python -m rlboost_runtime.coordinator RUN_FOLDER`: the coordinator of one run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import uvloop

from rlboost_runtime.coordinator.service import Coordinator
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.job import read_resolved
from rlboost_runtime.logs import explain, setup
from rlboost_runtime.run_folder import RunFolder
from rlboost_runtime.seams import SystemClock, SystemDisk

EX_CONFIG = 78
"""A restart would not help."""


async def _serve(run: RunFolder) -> None:
    await Coordinator(run, read_resolved(run.job_json), SystemClock(), SystemDisk()).serve()


def main() -> int:
    """Serve until the run ends; return the process's exit status."""
    setup("coordinator")
    run = RunFolder(Path(sys.argv[1]).absolute())
    if run.outcome.exists():
        return 0
    try:
        uvloop.run(_serve(run))
    except RLBoostError as error:
        explain(logging.getLogger(__name__), error)
        return EX_CONFIG if error.exit_code == 2 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
