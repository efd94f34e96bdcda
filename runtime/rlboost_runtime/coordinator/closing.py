"""Closing the books of a run whose coordinator is gone: by the supervisor, or by `rlboost down`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlboost_providers.base import MachineState, MachineView
from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.machine_bootstrap import RESERVED_MACHINE
from rlboost_runtime.run_folder import RunFolder


def close_books(run: RunFolder, views: Sequence[MachineView] | None, detail: str) -> None:
    """End every machine that the ledger has open and that the provider does not list as there.

    A machine of which the provider knows a start is billed from then on, also where nobody had heard of it.
    `views`: what the provider lists now; None, where it does not say: then only the reserved machine is
    ended.
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
        for name in ledger.open_machines():
            found = seen.get(name)
            is_there = views is None if found is None else found.state is not MachineState.GONE
            if is_there and name != RESERVED_MACHINE:
                continue
            ended_at = None if found is None else found.ended_at
            ledger.ended(name, time.time() if ended_at is None else ended_at, detail)
    finally:
        ledger.close()
