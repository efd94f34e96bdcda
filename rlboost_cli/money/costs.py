"""A run's cost report, out of its folder: while it runs, after it, and where it never started."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.coordinator.report import cost_report
from rlboost_runtime.job import Budget
from rlboost_runtime.machine_bootstrap import RESERVED_MACHINE
from rlboost_runtime.run_folder import RunFolder, read_json


def report_of(run: RunFolder) -> dict[str, object]:
    """Return the report up to now, or up to the end of a run that has ended, and which of them it is.

    `state` is how the run ended, or `open`.
    """
    if not run.ledger.exists():
        with tempfile.TemporaryDirectory() as folder:
            return _report(Ledger(Path(folder) / "ledger.sqlite"), run)
    return _report(Ledger(run.ledger, read_only=True), run)


def _report(ledger: Ledger, run: RunFolder) -> dict[str, object]:
    try:
        report = cost_report(ledger, _billed_until(ledger, run), run.name, _budget(run))
    finally:
        ledger.close()
    outcome = read_json(run.outcome)
    return {**report, "state": "open" if outcome is None else outcome.get("state", "stopped")}


def _budget(run: RunFolder) -> Budget:
    """Return the job's budget, read leniently: a report must not fail for another version's job file."""
    stored = (read_json(run.job_json) or {}).get("budget") or {}
    return Budget(max_usd=stored.get("max_usd"), max_usd_per_hour=stored.get("max_usd_per_hour"))


def _billed_until(ledger: Ledger, run: RunFolder) -> float:
    """Return now, or when the run ended: as its outcome says, or later, when its last machine did.

    Spot machines that outlive their run cost money until somebody ends them. Whoever killed a run's
    processes left the reserved machine open in the books: the outcome ends its bill.
    """
    now = time.time()
    try:
        outcome_at = run.outcome.stat().st_mtime
    except FileNotFoundError:
        return now
    if ledger.running_machines() - {RESERVED_MACHINE}:
        return now
    return min(now, max(outcome_at, ledger.last_end() or 0.0))
