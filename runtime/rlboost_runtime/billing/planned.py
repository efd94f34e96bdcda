"""What the plan said when a run was launched, kept in the run's folder, and where its bill differs from that.

The parts of a difference add up to it: for what was trained so far, the plan is taken per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Self

import msgspec

from rlboost_runtime.run.folder import RunFolder, read_json, write_json


class PlannedParts(msgspec.Struct, frozen=True):
    """A planned run. The dollars of reserved and spot machines, egress and storage add up to its total."""

    steps: int
    hours: float
    """From launch to end: the reserved machine's."""
    spot_hours: float
    """Machine-hours of all spot machines."""
    startup_usd: float
    """Of all: what is spent before the first step."""
    reserved_usd: float
    spot_usd: float
    boot_usd: float
    """Of `spot_usd`: before a machine's first work."""
    egress_usd: float
    storage_usd: float

    @property
    def total_usd(self) -> float:
        """Dollars of the whole run."""
        return self.reserved_usd + self.spot_usd + self.egress_usd + self.storage_usd

    @classmethod
    def mean(cls, parts: Sequence[Self]) -> Self:
        """Return the mean of at least one."""
        names = [name for name in cls.__struct_fields__ if name != "steps"]
        return cls(steps=parts[0].steps, **{n: fmean(getattr(each, n) for each in parts) for n in names})


class PlanDifference(msgspec.Struct, frozen=True):
    """Dollars by which the bill exceeds the plan, by cause; they add up to `actual_usd - planned_usd`."""

    steps: float = 0.0
    """Steps trained beyond the planned ones; below 0 where some are still to come."""
    boots: float = 0.0
    """Spot machines that had not worked yet."""
    machine_time: float = 0.0
    """More or fewer machine-hours than planned, boots left out, at the planned prices."""
    prices: float = 0.0
    """Machine-hours that cost another price than planned."""
    egress: float = 0.0
    storage: float = 0.0


class PlanComparison(msgspec.Struct, frozen=True):
    """The plan beside the bill, as `billing.report.compared` finds it."""

    planned_usd: float
    planned_hours: float
    actual_usd: float
    actual_hours: float
    """Of the reserved machine."""
    difference_usd: PlanDifference


def keep_plan(run: RunFolder, parts: PlannedParts) -> None:
    """Keep what the plan says of a run that is launched; what was said at its first launch stays."""
    if not run.plan.exists():
        write_json(run.plan, msgspec.to_builtins(parts))


def kept_plan(run: RunFolder) -> PlannedParts | None:
    """Return what the plan said at the launch; None where nothing usable was kept."""
    kept = read_json(run.plan)
    try:
        return None if kept is None else msgspec.convert(kept, PlannedParts)
    except msgspec.ValidationError:  # another version's
        return None
