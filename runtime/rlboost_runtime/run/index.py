"""Which runs there are, by name: read off the folders of `$RLBOOST_HOME`, without reading a job.

Cheap on purpose: commands that only look at a run load no more than this. `run.create` makes runs.
"""

from __future__ import annotations

import difflib
import os

from rlboost_runtime.errors import NotFound
from rlboost_runtime.processes import identify
from rlboost_runtime.run.folder import RunFolder, home, read_json, restore_outcome

_NAMES_TOLD = 8  # of the runs there are, in an error


def find_run(name: str) -> RunFolder:
    """Return the run called `name`. Raises `NotFound`, naming those that there are."""
    run = RunFolder.named(name)
    if _is_plain(name) and os.path.exists(run.job_json):  # pathlib raises where no file can have such a name
        return run
    names = [r.name for r in all_runs()]
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    others = ", ".join(names[-_NAMES_TOLD:])
    raise NotFound(f"no run {name} in {home() / 'runs'}", f"{meant}runs there: {others or 'none'}")


def all_runs() -> list[RunFolder]:
    """Return every run of `$RLBOOST_HOME`, oldest first."""
    try:
        folders = [p for p in (home() / "runs").iterdir() if _is_plain(p.name) and (p / "job.json").exists()]
    except FileNotFoundError:
        return []
    return [
        RunFolder(p) for p in sorted(folders, key=lambda p: ((p / "job.json").stat().st_mtime_ns, p.name))
    ]


def is_open(run: RunFolder) -> bool:
    """Return True if the run has not ended yet."""
    restore_outcome(run)
    return not run.outcome.exists()


def _is_plain(name: str) -> bool:
    return bool(name) and not name.startswith(".") and "/" not in name


def is_supervised(run: RunFolder) -> bool:
    """Return True if the run's supervisor lives; of a head elsewhere, if it did when last seen."""
    if run.head.exists():
        return bool((read_json(run.mirror) or {}).get("supervised"))
    noted = read_json(run.processes / "supervisor.json")
    return noted is not None and identify(int(noted["pid"]), float(noted["start"]), run.path) is not None
