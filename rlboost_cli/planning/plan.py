"""What a launch may cost and what it will take, before it happens: `rlboost plan` and `launch` show the same.

The machines and where spending ends follow from the job file; the forecast is simulated (`projection`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from msgspec import to_builtins

from rlboost_cli.planning.projection import SEEDS, EvaluationShare, Option, Projection
from rlboost_cli.planning.serving import ServingForecast
from rlboost_cli.simulation.runs import Estimate
from rlboost_cli.terminal.text import counted, duration, table, usd
from rlboost_providers.registry import expected_usd_per_hour, head_usd_per_hour
from rlboost_runtime.fit.plan import FitPlan, fit_plan_here
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
    forecast: Projection | None = None
    """None: it was not simulated, or could not be."""
    problem: str = ""
    """Why it could not be simulated."""
    fit: FitPlan | None = None
    """None: the model's configuration is not here, or nothing is trained."""
    only_serves: bool = False
    """Nothing is trained: it runs until `rlboost down`."""
    min_spot_machines: int = 0
    """Of a model that is only served, those that it always wants."""
    serving: ServingForecast | None = None
    """Of a model that is only served; None: it could not be simulated."""

    @property
    def is_charged(self) -> bool:
        """True if the launch can cost real money, so that a person is asked."""
        return any(line.is_charged for line in self.lines)

    @property
    def dearest_micro_usd_per_hour(self) -> int:
        """What an hour with all machines is likely to cost, as far as prices are known, spot ones at the
        dearest offer. No bound: a bid may be above the price, and a dearer zone the only one that has any."""
        return self._all_at(max)

    @property
    def cheapest_micro_usd_per_hour(self) -> int:
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


def launch_plan(
    run: str,
    job: Job,
    forecast: Projection | None = None,
    problem: str = "",
    serving: ServingForecast | None = None,
) -> LaunchPlan:
    """Return the plan of `job` under the name `run`, with the forecast made for it."""
    spot, head = job.rollout.spot, head_usd_per_hour(job)
    reserved = PlanLine("reserved", job.trainer.infra, 1 + job.trainer.bought_nodes, _micro_or_none(head))
    offers = [
        PlanLine("spot", o.infra, spot.max_instances, _micro_or_none(expected_usd_per_hour(o)))
        for o in spot.any_of
        if spot.max_instances
    ]
    return LaunchPlan(
        run=run,
        steps=job.algorithm.steps,
        lines=(reserved, *offers),
        max_spot_machines=spot.max_instances,
        max_usd=job.budget.max_usd,
        max_usd_per_hour=job.budget.max_usd_per_hour,
        head=_head_in_words(job),
        forecast=forecast,
        problem=problem,
        fit=None if job.only_serves else fit_plan_here(job),
        only_serves=job.only_serves,
        min_spot_machines=spot.min_instances if job.only_serves else 0,
        serving=serving,
    )


def describe_plan(plan: LaunchPlan) -> list[str]:
    """Return the plan in lines for a person."""
    lines = [f"{plan.run}: " + ("served until rlboost down" if plan.only_serves else f"{plan.steps} steps")]
    most_of = f"{plan.min_spot_machines} to" if plan.only_serves else "up to"
    for line in plan.lines:
        count = f"{line.max_machines}" if line.pool == "reserved" else f"{most_of} {line.max_machines}"
        lines.append(f"  {line.pool:<9}{count} x {line.infra}, {_price_in_words(line)}")
    known = ", at these prices" if plan.is_all_priced else ", plus the unknown prices above"
    hour = format_usd(plan.dearest_micro_usd_per_hour)
    if plan.cheapest_micro_usd_per_hour != plan.dearest_micro_usd_per_hour:
        hour = f"{format_usd(plan.cheapest_micro_usd_per_hour)} to {hour}"
    lines.append(f"  together {hour} per hour with the full fleet{known}")
    endless = "none: it runs until " + ("rlboost down" if plan.only_serves else "its steps are done")
    budget = endless if plan.max_usd is None else f"${plan.max_usd:,.2f}"
    hourly = "" if plan.max_usd_per_hour is None else f", at most ${plan.max_usd_per_hour:,.2f} per hour"
    lines.append(f"  budget   {budget}{hourly}")
    lines += [] if plan.fit is None else plan.fit.lines()
    if plan.head:
        lines += _labelled("head", plan.head)
    if not plan.is_charged:
        where = {line.infra for line in plan.lines}
        place = "this machine" if where == {"local"} else "machines of your own"
        counts = "" if plan.max_usd is None else ", also for the budget"
        lines += wrap(
            f"runs on {place}: nothing is billed, prices are illustrative{counts}",
            79,
            initial_indent="  ",
            subsequent_indent=" " * 11,
        )
    if plan.serving is not None:
        lines += _describe_serving(plan.serving)
    elif plan.forecast is not None:
        lines += _describe_projection(plan.forecast, plan)
    elif plan.problem:
        lines += _labelled("forecast", f"not possible: {plan.problem}")
    return lines


def _describe_serving(found: ServingForecast) -> list[str]:
    """Return what it costs at several loads, in lines for a person."""
    headers = ("load", "tokens/s", "requests/s", "spot", "per hour", "per million tokens", "wait p50", "p99")
    rows = [
        (
            f"{each.share:.0%}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.requests_per_s:,.2f}",
            f"{each.mean_spot_machines:.1f}",
            usd(each.usd_per_hour, 2),
            "-" if each.usd_per_million_tokens is None else usd(each.usd_per_million_tokens, 2),
            f"{each.p50_wait_s:.1f} s",
            f"{each.p99_wait_s:.1f} s",
        )
        for each in found.loads
    ]
    return [
        "",
        *(f"  {line}" for line in table(headers, rows).splitlines()),
        "",
        *_labelled("basis", serving_basis(found)),
    ]


def serving_basis(found: ServingForecast) -> str:
    """Return what the forecast of a served model rests on, in words."""
    return (
        "simulated, not measured: one run per load, which is a share of what the whole fleet generates;"
        f" spot: machines in the mean; {'; '.join(found.notes)}"
    )


def _price_in_words(line: PlanLine) -> str:
    if line.price_micro_usd_per_hour is None:
        return "price unknown"
    return f"{format_usd(line.price_micro_usd_per_hour)} per hour each"


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
    """Return the plan as JSON values; `forecast` is null where the job cannot be simulated."""
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
        "cheapest_fleet_usd_per_hour": plan.cheapest_micro_usd_per_hour / MICRO_USD_PER_USD,
        "dearest_fleet_usd_per_hour": plan.dearest_micro_usd_per_hour / MICRO_USD_PER_USD,
        "budget": {"max_usd": plan.max_usd, "max_usd_per_hour": plan.max_usd_per_hour},
        "fit": None if plan.fit is None else plan.fit.json(),
        "forecast": None if plan.forecast is None else _forecast_json(plan.forecast, plan),
        "problem": plan.problem,
        "serving": None
        if plan.serving is None
        else {
            "basis": serving_basis(plan.serving),
            "min_spot_machines": plan.min_spot_machines,
            "loads": [asdict(each) for each in plan.serving.loads],
        },
    }


def _describe_projection(found: Projection, plan: LaunchPlan) -> list[str]:
    """Return the forecast in lines for a person."""
    cost = f"{usd(found.usd.mean, 2)}{_half(found.usd, '$')}"
    if found.hours.mean < 2:
        took = f"{found.hours.mean * 60:,.1f}{_half(found.hours, '', 60)} min"
    else:
        took = f"{found.hours.mean:,.1f}{_half(found.hours)} h"
    if not found.usd.mean:
        words = f"{plan.steps} steps in {took}; the job has no prices"
        return [*_labelled("forecast", words), *_labelled("basis", basis_of(found))]
    per_million = f"{usd(found.usd_per_million_tokens, 2)} per million tokens"
    lines = _labelled("forecast", f"{plan.steps} steps in {took} for {cost}, {per_million}")
    if plan.max_usd is not None and found.usd.mean > plan.max_usd:
        done = int(plan.steps * plan.max_usd / found.usd.mean)
        words = f"too small: {usd(plan.max_usd, 2)} ends the run after about {done} of {plan.steps} steps"
        lines += _labelled("budget", words)
    lines += _labelled("parts", _parts(found))
    if found.evaluations.times:
        lines += _labelled("evals", _evaluations(found.evaluations))
    lines += _labelled("spot", _pays(found, plan))
    if found.options:
        rows = [(each.what + (" *" if each.is_job else ""), *_option_cells(each)) for each in found.options]
        headers = ("alternative", "time", "cost", "per million tokens")
        lines += [
            "",
            *(f"  {line}" for line in table(headers, rows).splitlines()),
            "  * the job as it is",
            *wrap(noise_in_words(found), 79, initial_indent="  ", subsequent_indent="  "),
            "",
        ]
    return [*lines, *_labelled("basis", basis_of(found))]


def _labelled(label: str, words: str) -> list[str]:
    return wrap(words, 79, initial_indent=f"  {label:<9}", subsequent_indent=" " * 11)


def basis_of(found: Projection) -> str:
    """Return what a forecast rests on, in words."""
    steps = f"the first {found.simulated_steps} steps" if found.simulated_steps > 1 else "one step"
    return (
        f"simulated, not measured: {steps} of {SEEDS} runs; 19 of 20 runs would lie within"
        f" the interval; {'; '.join(found.notes)}"
    )


def noise_in_words(found: Projection) -> str:
    """Return which differences between alternatives say nothing: those within the job's own interval."""
    noise = [
        f"{each.half_width / each.mean:.0%} in {what}"
        for what, each in (("time", found.hours), ("cost", found.usd))
        if each.half_width is not None and each.mean
    ]
    least = f"; differences below {' and '.join(noise)} may be chance" if noise else ""
    return f"each alternative is simulated once, on the same market{least}"


def _option_cells(option: Option) -> tuple[str, str, str]:
    return duration(3600 * option.hours), usd(option.usd, 2), usd(option.usd_per_million_tokens, 2)


def _half(found: Estimate, unit: str = "", scale: float = 1.0) -> str:
    places = 2 if unit == "$" else 1
    return "" if found.half_width is None else f" +- {unit}{found.half_width * scale:,.{places}f}"


def _parts(found: Projection) -> str:
    parts = found.parts
    shown = (("reserved", parts.reserved_usd), ("spot", parts.spot_usd), ("egress", parts.egress_usd))
    words = [
        f"{label} {usd(amount, 2)}" for label, amount in (*shown, ("storage", parts.storage_usd)) if amount
    ]
    words += [f"before the first step {usd(parts.startup_usd, 2)}", f"spot boots {usd(parts.boot_usd, 2)}"]
    return f"{', '.join(words[:-2])} ({', '.join(words[-2:])})"


def _evaluations(found: EvaluationShare) -> str:
    times, tokens = counted(found.times, "evaluation"), f"{found.tokens / 1e6:,.2f} million tokens"
    return f"{times} with {tokens}: {duration(3600 * found.hours)} and {usd(found.usd, 2)} of it"


def _pays(found: Projection, plan: LaunchPlan) -> str:
    """Return a clause about whether spot instances pay."""
    if not plan.max_spot_machines:
        return "none: the job is on demand only"
    if not plan.is_all_priced:
        return "whether it pays is not known: an offer has no price"
    saving, speedup = found.on_demand.saving_fraction, found.speedup
    if speedup is None:
        return f"whether it pays is {found.on_demand.basis}"
    faster = f"{speedup:.2f}x as fast as on demand only"
    if saving is None:
        return f"{faster}; the job has no prices to compare"
    alone = f"{usd(found.on_demand.usd_per_million_tokens, 2)} per million tokens on demand only"
    alone += f" at {usd(found.on_demand.usd_per_hour, 2)} per hour"
    if saving > 0:
        return f"pays: {saving:.0%} less than {alone}; {faster}"
    return f"does not pay: {-saving:.0%} more than {alone}; {faster}"


def _forecast_json(found: Projection, plan: LaunchPlan) -> dict[str, Any]:
    is_judged = plan.max_spot_machines > 0 and plan.is_all_priced
    saving = found.on_demand.saving_fraction if is_judged else None
    return {
        "basis": basis_of(found),
        "hours": asdict(found.hours),
        "usd": asdict(found.usd),
        "tokens": found.tokens,
        "usd_per_million_tokens": found.usd_per_million_tokens,
        "preemptions": found.preemptions,
        "parts": to_builtins(found.parts),
        "on_demand": to_builtins(found.on_demand),
        "speedup": found.speedup,
        "spot_pays": None if saving is None else saving > 0,
        "simulated_steps": found.simulated_steps,
        "evaluations": asdict(found.evaluations),
        "alternatives": [asdict(option) for option in found.options],
    }


def _micro(usd: float) -> int:
    return round(usd * MICRO_USD_PER_USD)


def _micro_or_none(usd: float | None) -> int | None:
    return None if usd is None else _micro(usd)


def _usd(micro: int | None) -> float | None:
    return None if micro is None else micro / MICRO_USD_PER_USD
