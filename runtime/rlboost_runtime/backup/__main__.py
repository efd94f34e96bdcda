"""`python -m rlboost_runtime.backup RUN_FOLDER`: copy the head to the job's output until SIGTERM.

Exit status 78: another machine is the head of the run now, and the run has to end here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rlboost_runtime.backup.streamer import Streamer
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.logs import explain, setup
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.resolved import read_resolved

log = logging.getLogger(__name__)

EX_CONFIG = 78
_NICENESS = 10
"""Tokens and training go first."""


def main() -> int:
    """Copy until SIGTERM; return the process's exit status."""
    setup("backup")
    os.nice(_NICENESS)
    run = RunFolder(Path(sys.argv[1]).absolute())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        streamer = Streamer.for_run(run, read_resolved(run.job_json))
        assert streamer is not None  # the supervisor starts this for jobs with an output only
        while not stop.is_set():
            began = time.monotonic()
            has_more = streamer.attempt()
            if not has_more:
                stop.wait(max(0.0, streamer.pause_s - (time.monotonic() - began)))
    except RLBoostError as error:
        explain(log, error)
        return EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
