"""A monthly budget at the cloud itself, which sends mail when machines of one `RLBOOST_HOME` have cost much.

It is a safety net outside of RLBoost: it counts what the cloud bills, whatever became of our processes. A
cloud learns of a machine's cost within a day, so it stops nothing; `budget.max_usd` of a job does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

SHARES = (0.5, 0.8, 1.0)
"""Of the budget, at which mail is sent."""


@dataclass(frozen=True, slots=True)
class BudgetAlert:
    """A budget as its cloud has it."""

    name: str
    usd_per_month: float
    """In dollars, or in the currency of the billing account."""
    counts: str
    """Which costs it counts."""
    notes: tuple[str, ...] = ()
    """What a person has yet to do."""


class BudgetAlerts(Protocol):
    """The budgets of an account. Both raise `ProviderError` and its kinds."""

    def set(self, owner: str, usd_per_month: float) -> BudgetAlert:
        """Make the budget of `owner` (`base.tags`), or change it; idempotent."""
        ...

    def delete(self, owner: str) -> bool:
        """Delete the budget of `owner`; return False if there was none."""
        ...


def name_of(owner: str) -> str:
    """Return what the budget of an owner is called."""
    return f"rlboost-{owner}"
