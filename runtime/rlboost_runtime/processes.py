"""Ending what is left of a run on this machine: politely first, then for certain.

Processes are found by their tag (`process_tags`), whoever started them and also after their parent is gone.
The caller and its ancestors are never touched.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from rlboost_runtime.process_tags import kill_tagged, tagged, tags

__all__ = ["end_all", "run_environment", "tagged"]


def run_environment(run_folder: Path) -> dict[str, str]:
    """Return this process's environment with the run's tag: what a process of the run is started with."""
    return os.environ | tags(run_folder)


def end_all(run_folder: Path, grace_s: float) -> list[int]:
    """End every process of the run: SIGTERM, `grace_s` seconds to clean up, then SIGKILL. Blocks.

    Returns the pids of those that were there; once it returns none is left, also none that a dying process
    started meanwhile. Raises `RuntimeFault`, naming them, where some outlive SIGKILL.
    """
    found: dict[int, None] = {}
    deadline = time.monotonic() + grace_s
    while (processes := tagged(run_folder)) and time.monotonic() < deadline:
        for process in processes:
            if process.pid not in found:  # a second SIGTERM would mean "now"
                _terminate(process)
        found.update(dict.fromkeys(p.pid for p in processes))
        psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
    found.update(dict.fromkeys(p.pid for p in tagged(run_folder)))
    kill_tagged(run_folder)
    return list(found)


def _terminate(process: psutil.Process) -> None:
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return
