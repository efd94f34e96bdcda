"""Deleting an ended run's folder.

A run that is open, has a living process or may still cost money is never deleted: its folder is
needed to find and end its machines.
"""

from __future__ import annotations

import os
import shutil

from rlboost_runtime.billing.books import unsettled
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.processes import delete_temporary_folder, tagged
from rlboost_runtime.run import in_memory
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.index import is_open


def require_removable(run: RunFolder) -> None:
    """Raise `ConfigError` unless the run has ended and nothing of it is left."""
    hint = f"type rlboost down {run.name} first"
    if is_open(run):
        raise ConfigError(f"{run.name} has not ended", hint)
    if tagged(run.path):
        raise ConfigError(f"processes of {run.name} are still running", hint)
    if left := unsettled(run):
        names = ", ".join(machine.machine for machine in left)
        raise ConfigError(f"machines of {run.name} may still cost money: {names}", hint)


def remove(run: RunFolder) -> None:
    """Delete the run's folder. It leaves the list of runs at once, whole. Raises `RuntimeFault`."""
    require_removable(run)
    in_memory.free_run(run)
    delete_temporary_folder(run.path)
    hidden = run.path.with_name(f".{run.name}.deleted-{os.getpid()}")
    try:
        run.path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as exc:
        raise RuntimeFault(
            f"{run.path} cannot be deleted: {exc.strerror}", "check who owns the folder"
        ) from exc
