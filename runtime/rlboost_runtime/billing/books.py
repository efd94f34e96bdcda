"""Closing the books of a run whose coordinator is gone: by the supervisor, or by `rlboost down`.

A run's cost report, out of its folder: while it runs, after it, and where it never started.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlboost_providers.base.provider import MachineStatus, MachineView
from rlboost_runtime.billing.accounts import MachineBill
from rlboost_runtime.billing.launch_records import end_of
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.billing.planned import kept_plan
from rlboost_runtime.billing.report import CostReport, compared, cost_report
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import Budget
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE


def close_books(
    run: RunFolder, views: Sequence[MachineView] | None, detail: str, lost_at: float | None = None
) -> None:
    """End every machine that the ledger has open and that the provider does not list as there.

    A machine of which the provider knows a start is billed from then on, also where nobody had heard of it.
    `views`: what the provider lists now; None, where it does not say: then only the reserved machine is
    ended. `lost_at`: when the head was lost, with the machines that were processes of it.
    Call it only while no coordinator of the run lives; doing it again changes nothing. Raises `RuntimeFault`
    where the ledger cannot be used.
    """
    if not run.ledger.exists():
        return
    seen = {view.machine: view for view in views or ()}
    ledger = Ledger(run.ledger)
    try:
        unbilled = ledger.unbilled_machines()
        for name, view in seen.items():
            if name in unbilled and view.started_at is not None:
                ledger.launched(name, view.started_at)
        on_head = {bill.machine for bill in ledger.machines(time.time()) if bill.provider == "local"}
        for name in ledger.open_machines():
            found = seen.get(name)
            is_there = views is None if found is None else found.state is not MachineStatus.GONE
            if not is_there or name == RESERVED_MACHINE:
                was_on_head = found is None and name in {RESERVED_MACHINE, *on_head}
                end = end_of(found, time.time()) if lost_at is None or not was_on_head else lost_at
                ledger.ended(name, end, detail)
    finally:
        ledger.close()


def launched_in(run: RunFolder) -> set[str] | None:
    """Return the providers at which the run was ever about to launch a machine; None if the books are absent
    or damaged.

    An intent is in the books before its provider is asked: no machine of the run is at any other.
    """
    if not run.ledger.exists():
        return None
    try:
        ledger = Ledger(run.ledger, read_only=True)
    except RuntimeFault:  # machines have to be ended all the same
        return None
    try:
        return ledger.clouds()
    finally:
        ledger.close()


def unsettled(run: RunFolder) -> list[MachineBill]:
    """Return the spot machines that are open in the books: they may cost money. Raises like `launched_in`."""
    if not run.ledger.exists():
        return []
    ledger = Ledger(run.ledger, read_only=True)
    try:
        is_open = set(ledger.open_machines()) - {RESERVED_MACHINE}
        return [bill for bill in ledger.machines(time.time()) if bill.machine in is_open]
    finally:
        ledger.close()


def report_of(run: RunFolder) -> CostReport:
    """Return the report up to now, or up to the end of a run that has ended, and which of them it is.

    `state` is how the run ended, or `open`.
    """
    if not run.ledger.exists():
        with tempfile.TemporaryDirectory() as folder:
            return _report(Ledger(Path(folder) / "ledger.sqlite"), run)
    return _report(Ledger(run.ledger, read_only=True), run)


def _report(ledger: Ledger, run: RunFolder) -> CostReport:
    try:
        report = cost_report(ledger, _billed_until(ledger, run), run.name, _budget(run))
    finally:
        ledger.close()
    if (plan := kept_plan(run)) is not None:
        report.plan = compared(plan, report)
    outcome = read_json(run.outcome)
    if outcome is not None:
        report.state = str(outcome.get("state", "stopped"))
    return report


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
