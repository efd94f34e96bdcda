"""What a launch may cost and what it will take, before it happens: `rlboost plan` and `launch` show the same.

The machines and where spending ends follow from the job file. The forecast rests on a former run of this home
with the same model and engine, and is None where there is none: nothing is made up in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from rlboost_cli.planning.forecast import Forecast, ForecastRow, forecast
from rlboost_cli.planning.rates import measured_rates
from rlboost_cli.terminal.text import duration, table
from rlboost_providers.registry import expected_usd_per_hour, head_usd_per_hour, prices_beside
from rlboost_runtime.job import Job
from rlboost_runtime.money import MICRO_USD_PER_USD, format_usd


@dataclass(frozen=True, slots=True)
class PlanLine:
    """Up to `max_machines` machines of one kind. In micro-dollars per machine-hour; None: nobody knows."""

    pool: str
    infra: str
    max_machines: int
    price_micro_usd_per_hour: int | None

    @property
    def is_charged(self) -> bool:
        """True if a cloud sends a bill: processes on this machine cost nothing, whatever price is noted."""
        return self.infra != "local" and self.price_micro_usd_per_hour != 0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The machines that a run may use, and where spending ends."""

    run: str
    steps: int
    lines: tuple[PlanLine, ...]
    max_spot_machines: int
    max_usd: float | None
    max_usd_per_hour: float | None
    head: str = ""
    """When the rented head shuts down, in words; empty: none is rented."""
    forecast: Forecast | None = None
    """None: nothing like this job has been measured here."""

    @property
    def is_charged(self) -> bool:
        """True if the launch can cost real money, so that a person is asked."""
        return any(line.is_charged for line in self.lines)

    @property
    def all_micro_usd_per_hour(self) -> int:
        """What an hour with all machines is likely to cost, as far as prices are known, spot ones at the
        dearest offer. No bound: a bid may be above the price, and a dearer zone the only one that has any."""
        return self._all_at(max)

    @property
    def least_micro_usd_per_hour(self) -> int:
        """The same with all spot ones at the cheapest offer, which is bought first."""
        return self._all_at(min)

    def _all_at(self, one_of: Callable[[Iterable[int]], int]) -> int:
        prices = [(line, line.price_micro_usd_per_hour or 0) for line in self.lines]
        reserved = sum(line.max_machines * price for line, price in prices if line.pool == "reserved")
        known = [line.price_micro_usd_per_hour for line in self.lines if line.pool == "spot"]
        spot = one_of([price for price in known if price is not None] or [0])
        return reserved + self.max_spot_machines * spot

    @property
    def is_all_priced(self) -> bool:
        """True if a price is known for each kind of machine."""
        return all(line.price_micro_usd_per_hour is not None for line in self.lines)


def launch_plan(run: str, job: Job) -> LaunchPlan:
    """Return the plan of `job` under the name `run`; reads the ledgers of former runs."""
    measured = measured_rates(job)
    spot, head = job.rollout.spot, head_usd_per_hour(job)
    reserved = PlanLine("reserved", job.trainer.infra, 1, _micro_or_none(head))
    offers = [
        PlanLine("spot", o.infra, spot.max_instances, _micro_or_none(expected_usd_per_hour(o)))
        for o in spot.any_of
    ]
    return LaunchPlan(
        run=run,
        steps=job.algorithm.steps,
        lines=(reserved, *offers),
        max_spot_machines=spot.max_instances,
        max_usd=job.budget.max_usd,
        max_usd_per_hour=job.budget.max_usd_per_hour,
        head=_head_in_words(job),
        forecast=None if measured is None else forecast(job, prices_beside(job, head), *measured),
    )


def describe_plan(plan: LaunchPlan) -> list[str]:
    """Return the plan in lines for a person."""
    lines = [f"{plan.run}: {plan.steps} steps"]
    for line in plan.lines:
        count = f"{line.max_machines}" if line.pool == "reserved" else f"up to {line.max_machines}"
        lines.append(f"  {line.pool:<9}{count} x {line.infra}, {_price_in_words(line)}")
    known = "" if plan.is_all_priced else ", plus the unknown prices above"
    hour = format_usd(plan.all_micro_usd_per_hour, 4)
    if plan.least_micro_usd_per_hour != plan.all_micro_usd_per_hour:
        hour = f"{format_usd(plan.least_micro_usd_per_hour, 4)} to {hour}"
    lines.append(f"  cost     up to {hour} per hour with the full fleet{known}")
    budget = "none: it runs until its steps are done" if plan.max_usd is None else f"${plan.max_usd:,.2f}"
    hourly = "" if plan.max_usd_per_hour is None else f", at most ${plan.max_usd_per_hour:,.2f} per hour"
    lines.append(f"  budget   {budget}{hourly}")
    if plan.head:
        lines += wrap(plan.head, 79, initial_indent="  head     ", subsequent_indent=" " * 11)
    if not plan.is_charged:
        where = {line.infra for line in plan.lines}
        place = "this machine" if where == {"local"} else "machines of your own"
        lines.append(f"  runs on {place}: nothing is billed, prices are illustrative")
    if plan.forecast is None:
        return [*lines, "  forecast none: this model and engine have not been measured yet"]
    return [*lines, *_describe_forecast(plan.forecast, plan)]


def _price_in_words(line: PlanLine) -> str:
    if line.price_micro_usd_per_hour is None:
        return "price unknown"
    return f"{format_usd(line.price_micro_usd_per_hour, 4)} per hour each"


def _head_in_words(job: Job) -> str:
    if not job.trainer.is_bought:
        return ""
    if not job.trainer.ends_itself:
        ways = (("is done", job.after.done), ("has failed", job.after.failed))
        given_back = " or ".join(words for words, what in ways if what == "down")
        watched = f"a `launch` that you watch {given_back}, or until " if given_back else ""
        return (
            f"on-demand; it cannot end itself there, and costs until {watched}`rlboost down`;"
            " results stay on its disk until then"
        )
    idle = duration(job.after.idle_minutes * 60)
    if job.after.done == "stay":
        done = "stays up after a finished run, and costs money, until `rlboost down`"
    elif job.output is not None:
        done = f"shuts down once the results are at {job.output}"
    else:
        done = (
            f"shuts down {idle} after a finished run, and its results are lost: fetch them before with"
            " `rlboost down`, or stay attached"
        )
    goes = job.after.failed == "down"
    failed = f"{idle} after a failure" if goes else "stays up after a failure"
    return f"on-demand; {done}; {failed}; and after {idle} without activity"


def plan_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as JSON values; `forecast` is null where nothing was measured."""
    return {
        "run": plan.run,
        "steps": plan.steps,
        "offers": [
            {
                "pool": line.pool,
                "infra": line.infra,
                "max_machines": line.max_machines,
                "price_usd_per_hour": _usd(line.price_micro_usd_per_hour),
            }
            for line in plan.lines
        ],
        "is_charged": plan.is_charged,
        "least_usd_per_hour": plan.least_micro_usd_per_hour / MICRO_USD_PER_USD,
        "expected_usd_per_hour": plan.all_micro_usd_per_hour / MICRO_USD_PER_USD,
        "budget": {"max_usd": plan.max_usd, "max_usd_per_hour": plan.max_usd_per_hour},
        "forecast": None if plan.forecast is None else _forecast_json(plan.forecast, plan.steps),
    }


def basis_of(found: Forecast) -> str:
    """Return where a forecast's figures are from, in words."""
    rates = found.rates
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(rates.ended_at))
    length = f"{rates.tokens_per_response:,.0f} tokens per response"
    assumed = f"{length} as there" if found.responses_like_before else "every response as long as it may be"
    return (
        f"computed from {rates.num_steps} steps of run {rates.run}, measured here {day} with the same model,"
        f" engine and trainer and {rates.spot_instances:.1f} spot instances on average; {assumed};"
        f" its own steps took {rates.step_s:.1f} s, of which the rates explain {found.computed_s:.1f} s:"
        f" {found.left_out_s:.1f} s are added to each step"
    )


def _describe_forecast(found: Forecast, plan: LaunchPlan) -> list[str]:
    rows = [
        (
            f"{row.instances:g}" + (" (useful)" if row.instances == found.useful_instances else ""),
            f"{row.seeding_s:.1f} s",
            f"{row.step_s:.1f} s",
            format_usd(_micro(row.usd_per_hour)),
            format_usd(_micro(row.usd_per_million_tokens)),
        )
        for row in found.rows
    ]
    headers = ("instances", "window", "step", "per hour", "per million tokens")
    lines = ["", *(f"  {line}" for line in table(headers, rows).splitlines()), ""]
    planned = found.row(found.useful_instances)
    if planned is not None:
        took = duration(plan.steps * planned.step_s)
        cost = format_usd(_micro(_run_usd(planned, plan.steps)))
        lines.append(f"  forecast {plan.steps} steps in {took} for {cost}, if the instances stay")
    lines.append(f"  spot     {_pays(found)}")
    return [*lines, *wrap(basis_of(found), 79, initial_indent="  basis    ", subsequent_indent=" " * 11)]


def _pays(found: Forecast) -> str:
    """Return a clause about whether spot instances pay."""
    speedup, saving = found.speedup, found.saving_fraction
    if found.useful_instances == 0:
        return "no instances are wanted"
    if speedup is None:
        return "whether it pays is not known: only one of the two pools has been measured"
    faster = f"{speedup:.2f}x as fast as without"
    if saving is None:
        return f"{faster}; the job has no prices to compare"
    if saving > 0:
        return f"pays: {saving:.0%} less per token, {faster}"
    return f"does not pay: {-saving:.0%} more per token, {faster}"


def _forecast_json(found: Forecast, steps: int) -> dict[str, Any]:
    planned = found.row(found.useful_instances)
    return {
        "basis": basis_of(found),
        "measured": asdict(found.rates),
        "check": {
            "computed_step_s": found.computed_s,
            "measured_step_s": found.rates.step_s,
            "added_s": found.left_out_s,
        },
        "tokens_per_step": found.tokens_per_step,
        "useful_instances": found.useful_instances,
        "step_s": None if planned is None else planned.step_s,
        "usd_per_hour": None if planned is None else planned.usd_per_hour,
        "usd_per_million_tokens": None if planned is None else planned.usd_per_million_tokens,
        "run_usd": None if planned is None else _run_usd(planned, steps),
        "spot_pays": None if found.saving_fraction is None else found.saving_fraction > 0,
        "saving_fraction": found.saving_fraction,
        "speedup": found.speedup,
        "rows": [asdict(row) for row in found.rows],
    }


def _run_usd(row: ForecastRow, steps: int) -> float:
    return row.usd_per_hour * steps * row.step_s / 3600


def _micro(usd: float) -> int:
    return round(usd * MICRO_USD_PER_USD)


def _micro_or_none(usd: float | None) -> int | None:
    return None if usd is None else _micro(usd)


def _usd(micro: int | None) -> float | None:
    return None if micro is None else micro / MICRO_USD_PER_USD
