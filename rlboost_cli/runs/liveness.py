"""Whether somebody looks after a run: read off its files and the process table, quickly.

Of a run whose head is elsewhere: whether that was so when the head was last seen."""

from __future__ import annotations

from rlboost_runtime.process_tags import identify
from rlboost_runtime.run_folder import RunFolder, read_json


def is_supervised(run: RunFolder) -> bool:
    """Whether the run's supervisor lives."""
    if run.head.exists():
        return bool((read_json(run.mirror) or {}).get("supervised"))
    noted = read_json(run.processes / "supervisor.json")
    return noted is not None and identify(int(noted["pid"]), float(noted["started_at"]), run.path) is not None
