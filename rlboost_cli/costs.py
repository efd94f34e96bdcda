"""A run's cost report, out of its ledger: while it runs, after it, and where it never started."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.coordinator.report import cost_report
from rlboost_runtime.run_folder import RunFolder


def report_of(run: RunFolder) -> dict[str, object]:
    """Return the report up to now, or up to the end of a run that has ended."""
    if not run.ledger.exists():
        with tempfile.TemporaryDirectory() as folder:
            return _report(Ledger(Path(folder) / "ledger.sqlite"), run)
    return _report(Ledger(run.ledger, read_only=True), run)


def _report(ledger: Ledger, run: RunFolder) -> dict[str, object]:
    try:
        return cost_report(ledger, _billed_until(ledger, run), run.name)
    finally:
        ledger.close()


def _billed_until(ledger: Ledger, run: RunFolder) -> float:
    """Return now, or when the run ended: as its outcome says, or later, when its last machine did."""
    now = time.time()
    try:
        outcome_at = run.outcome.stat().st_mtime
    except FileNotFoundError:
        return now
    return min(now, max(outcome_at, ledger.last_end() or 0.0))
