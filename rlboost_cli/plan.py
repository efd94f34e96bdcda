"""What a launch may cost, before it happens."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost_runtime.core.money import MICRO_USD_PER_USD, format_usd
from rlboost_runtime.job import Job


@dataclass(frozen=True, slots=True)
class PlanLine:
    """Up to `max_machines` machines of one kind. Price in micro-dollars per machine-hour."""

    pool: str
    infra: str
    max_machines: int
    price_micro_usd_per_hour: int

    @property
    def is_charged(self) -> bool:
        """Whether somebody sends a bill: processes on this machine cost nothing, whatever price is noted."""
        return self.infra != "local" and self.price_micro_usd_per_hour > 0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The machines that a run may use, and where spending ends."""

    run: str
    steps: int
    lines: tuple[PlanLine, ...]
    max_spot_machines: int
    max_usd: float | None
    max_usd_per_hour: float | None

    @property
    def is_charged(self) -> bool:
        """Whether the launch can cost real money, so that a person is asked."""
        return any(line.is_charged for line in self.lines)

    @property
    def ceiling_micro_usd_per_hour(self) -> int:
        """The most that an hour can cost: all reserved machines, all spot machines at the dearest offer."""
        reserved = sum(
            line.max_machines * line.price_micro_usd_per_hour
            for line in self.lines
            if line.pool == "reserved"
        )
        spot = max((o.price_micro_usd_per_hour for o in self.lines if o.pool == "spot"), default=0)
        return reserved + self.max_spot_machines * spot


def launch_plan(run: str, job: Job) -> LaunchPlan:
    """Return the plan of `job` under the name `run`."""
    spot = job.rollout.spot
    reserved = PlanLine("reserved", job.trainer.infra, 1, _micro(job.trainer.price_usd_per_hour))
    offers = [
        PlanLine("spot", o.infra, spot.max_instances, _micro(o.price_usd_per_hour)) for o in spot.any_of
    ]
    return LaunchPlan(
        run=run,
        steps=job.algorithm.steps,
        lines=(reserved, *offers),
        max_spot_machines=spot.max_instances,
        max_usd=job.budget.max_usd,
        max_usd_per_hour=job.budget.max_usd_per_hour,
    )


def describe_plan(plan: LaunchPlan) -> list[str]:
    """Return the plan in lines for a person."""
    lines = [f"{plan.run}: {plan.steps} steps"]
    for line in plan.lines:
        count = f"{line.max_machines}" if line.pool == "reserved" else f"up to {line.max_machines}"
        price = format_usd(line.price_micro_usd_per_hour, 4)
        lines.append(f"  {line.pool:<9}{count} x {line.infra}, {price} per hour each")
    lines.append(f"  ceiling  {format_usd(plan.ceiling_micro_usd_per_hour, 4)} per hour")
    budget = "none: it runs until its steps are done" if plan.max_usd is None else f"${plan.max_usd:,.2f}"
    hourly = "" if plan.max_usd_per_hour is None else f", at most ${plan.max_usd_per_hour:,.2f} per hour"
    lines.append(f"  budget   {budget}{hourly}")
    if not plan.is_charged:
        lines.append("  everything runs on this machine: it costs nothing, prices are only for the report")
    return lines


def _micro(usd: float) -> int:
    return round(usd * MICRO_USD_PER_USD)
