"""What storms over any cloud hold the fleet to: its budget, and books that know of every machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlboost_runtime.billing.accounts import room_micro_usd, to_ns
from tests.unit.coordinator.test_fleet import Made


def hold_to_budget(made: Made, budget_micro_usd: int) -> None:
    """Let the fleet launch while there is room, by the coordinator's own rule."""

    def room() -> int:
        now, ledger = time.time(), made.ledger
        return room_micro_usd(budget_micro_usd, ledger.total_micro_usd(now), ledger.machines(now), to_ns(now))

    made.fleet._room = room


def check_books(made: Made, budget_micro_usd: int, bought: Sequence[str]) -> set[str]:
    """Hold the ledger, in which everything is over, against what was bought; return the machines billed."""
    assert len(bought) == len(set(bought)), f"a machine was bought twice: {bought}"
    in_a_while = time.time() + 100
    assert made.ledger.total_micro_usd(in_a_while) <= budget_micro_usd
    assert made.ledger.open_machines() == []
    billed = {bill.machine for bill in made.ledger.machines(in_a_while) if bill.billed_ns}
    assert len(billed) >= len(bought), "the ledger does not know of a machine"
    return billed
