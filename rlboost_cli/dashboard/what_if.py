"""What the run would take and cost with other machines: simulated like `rlboost plan`, for the page.

A process of its own at the lowest priority simulates, so that neither the page nor the run waits for it:
`python -m rlboost_cli.dashboard.what_if RUN_FOLDER` prints the options as one line of JSON. Rates are those
that were measured in the run so far.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.resolved import read_resolved

FIRST_STEP = 2
"""Steps that must be trained before the first simulation: before them nothing was measured."""
AGAIN_S = 300.0
"""Shortest time between two simulations of a run."""
TIMEOUT_S = 600.0


class WhatIf:
    """The options of one run, found in the background while somebody looks."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._found: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._began_at = 0.0

    def now(self, step: int, *, has_ended: bool) -> dict[str, Any]:
        """Return what is known: {"step", "options"}, {"problem"}, or nothing yet. Starts a simulation where
        it is time for one; an ended run is not simulated again."""
        is_busy = self._thread is not None and self._thread.is_alive()
        is_new = step != self._found.get("step") and time.monotonic() - self._began_at > AGAIN_S
        if step >= FIRST_STEP and not is_busy and (not self._began_at or (is_new and not has_ended)):
            self._began_at = time.monotonic()
            self._thread = threading.Thread(target=self._simulate, args=(step,), daemon=True)
            self._thread.start()
        return self._found

    def _simulate(self, step: int) -> None:
        command = [sys.executable, "-m", "rlboost_cli.dashboard.what_if", str(self._run.path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            self._found = {"step": step, **json.loads(done.stdout)}
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._found = {"step": step, "problem": f"not simulated: {error}"}


def options_of(run: RunFolder) -> dict[str, Any]:
    """Return the options as `plan --json` has them, cheapest tokens first, or why there are none."""
    from rlboost_cli.planning.plan import basis_of, noise_in_words
    from rlboost_cli.planning.projection import project

    try:
        found = project(read_resolved(run.job_json), run.files, with_options=True)
    except RLBoostError as error:
        return {"problem": f"not simulated: {error.problem}"}
    basis = f"{basis_of(found)}; {noise_in_words(found)}"
    return {"basis": basis, "options": [asdict(option) for option in found.options]}


if __name__ == "__main__":
    os.nice(19)
    print(json.dumps(options_of(RunFolder(Path(sys.argv[1]).absolute()))))
