"""Starting a run's supervisor on this machine, and telling whether one lives.

Guarantee: at most one supervisor per run is started, also by commands that run at the same moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlboost_cli.runs import client
from rlboost_cli.terminal.errors import full_disk
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.processes import run_environment, start_session
from rlboost_runtime.run.folder import RunFolder, locked, write_json
from rlboost_runtime.run.index import is_supervised

START_DEADLINE_S = 60.0
"""How long a supervisor and its coordinator may take until the coordinator answers."""

_POLL_S = 0.1
_LAST_LINES = 15


def want_training(run: RunFolder) -> None:
    """Tell the supervisor, now or when it starts, to run the trainer too."""
    write_json(run.wanted, {"train": True})


def bring_up(run: RunFolder, progress: Callable[[str], None]) -> dict[str, Any]:
    """Start the supervisor where none lives, wait until the coordinator answers, return its first status.

    Returns an empty one where the run ended meanwhile: its outcome says why. Raises `RuntimeFault` with the
    last lines of the log where it does not come up, and what `head.control` does of a head elsewhere.
    """
    if run.head.exists():
        from rlboost_cli.head import control

        return control.bring_up(run, progress)
    child: subprocess.Popen[bytes] | None = None
    deadline = time.monotonic() + START_DEADLINE_S
    with locked(run.processes / ".starting"):
        if not is_supervised(run):
            progress(f"starting the processes of {run.name}")
            child = _start(run)
        else:
            progress(f"waiting for the coordinator of {run.name}")
        while not run.outcome.exists():
            try:
                return client.get_status(run)
            except client.NotAnswering as silence:
                _give_up_if_hopeless(run, child, deadline, silence)
            if child is None and not is_supervised(run):  # it was that of the run's former end
                child = _start(run)
            time.sleep(_POLL_S)
    return {}


def log_tail(path: Path) -> str:
    """Return the last lines of a log file, indented; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-_LAST_LINES:])


def _start(run: RunFolder) -> subprocess.Popen[bytes]:
    run.logs.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-m", "rlboost_runtime.supervisor", str(run.path)]
    return start_session(command, _environment(run), run.path, run.logs / "supervisor.log")


def _environment(run: RunFolder) -> dict[str, str]:
    """Return our environment with the run's tag, and with the same places to import from as we have.

    The paths are made absolute: the supervisor runs in the run's folder.
    """
    environment = run_environment(run.path)
    if python_path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in python_path.split(os.pathsep))
    return environment


def _give_up_if_hopeless(
    run: RunFolder, child: subprocess.Popen[bytes] | None, deadline: float, silence: RLBoostError
) -> None:
    ended = child is not None and child.poll() not in (None, 0)  # 0: a command killed meanwhile started one
    if ended and (full := full_disk(run.path)):
        raise RuntimeFault(
            f"{full}: {run.name} cannot start", f"make room there, then type rlboost launch {run.name}"
        )
    if not ended and time.monotonic() < deadline:
        return
    supervisor, coordinator = run.logs / "supervisor.log", run.logs / "coordinator.log"
    path = supervisor if ended or not coordinator.exists() else coordinator
    what = (
        f"the supervisor of {run.name} ended with code {child.returncode}"
        if ended and child is not None
        else f"{silence.problem} (waited {START_DEADLINE_S:.0f} s)"
    )
    raise RuntimeFault(f"{what}; last lines of {path}:\n{log_tail(path)}", f"read {path}")
