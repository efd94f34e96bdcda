"""The cost report as text for a person: at most 80 columns, no colour. Pure.

Whatever there is much of (steps, machines) is summed in few lines; `cost_csv` and `--json` have all of it.

The cost report as one CSV table with a header.

Rows by `kind`:

- `machine`: one per machine, also those whose launch was refused (at no cost). Their `usd`, and that of the
  `other` rows, add up to the run's total;
- `other`: egress and storage;
- `step`: one per trained step, numbered from 1. Their `usd`, and that of the two `outside` rows (`before` the
  first step and `after` the last), add up to the total as well: money appears twice in the table, by
  machine and by step.

Columns that do not apply are empty:

===================  =========================================================================================
kind                 machine, other, step or outside
id                   the machine's name, the step's number, egress, storage, before or after
pool                 reserved or spot
zone                 where the machine was
started_at           UTC, ISO 8601, to the microsecond: first launch, or the step's begin
ended_at             likewise; empty while it lasts
seconds              billed, all lives together; or from the step's begin to its end
tokens               response tokens that the step was trained on
reward_mean          mean reward of the step
price_usd_per_hour   of the machine, the last one
usd                  what it cost; a step pays for all that was spent since the end of the one before
useful_usd           the part of a machine's `usd` that was not found to be wasted
boot_usd ..          and the parts that were (boot, idle, lost, redone); with it they add up to `usd`
===================  =========================================================================================

Dollars have six decimals and are exact.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from rlboost_cli.terminal.text import duration, table, usd
from rlboost_runtime.money import money_places

if TYPE_CHECKING:
    from rlboost_runtime.billing.counterfactual import Counterfactual
    from rlboost_runtime.billing.planned import PlanComparison
    from rlboost_runtime.billing.report import BudgetState, CostReport, MachineCost, StepCost

WIDTH = 80
MAX_STEP_LINES = 12

Usd = Callable[[float], str]


def cost_lines(report: CostReport) -> list[str]:
    """Return the report: what was spent, on what, by step, by offer, and what on-demand would have cost."""
    places = money_places(report.total_usd)

    def money(value: float) -> str:
        return usd(value, places)

    blocks = [
        _summary(report, money),
        table(("", "reserved", "spot", "total"), _by_cause(report, money)).splitlines(),
        _on_demand(report.counterfactual),
        _planned(report.plan, money),
        _steps(report, money),
        _offers(report, money),
        [line for note in report.notes for line in _wrapped("note: ", note)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block).splitlines()


# --- the whole run -----------------------------------------------------------------------------------------


def _summary(report: CostReport, money: Usd) -> list[str]:
    per_million, trains = report.usd_per_million_tokens, report.tokens_trained or not report.requests_served
    price = "" if per_million is None else f", {usd(per_million, 2)} per million, start-up included"
    served = f"{report.tokens_served:,} served in {report.requests_served:,} requests"
    tokens = [f"{report.tokens_trained:,} trained{price}"] if trains else [f"{served}{price}"]
    tokens += [served] if trains and report.requests_served else []
    is_open = report.state == "open"
    rate = report.rate_usd_per_hour
    so_far = f" so far, {usd(rate, 2)} per hour now" if is_open else f" in total, {report.state}"
    if not is_open and rate and any(m.pool == "spot" and m.state == "running" for m in report.machines):
        so_far += f", but machines are left at {usd(rate, 2)} per hour: rlboost down {report.run}"
    return [
        line
        for label, words in (
            (report.run, f"{money(report.total_usd)}{so_far}"),
            ("budget", _budget(report.budget)),
            ("tokens", "; ".join(tokens)),
        )
        for line in _wrapped(f"{label:<9} " if len(label) < 9 else f"{label}: ", words)
    ]


def _budget(budget: BudgetState) -> str:
    most, left, hourly = budget.max_usd, budget.left_usd, budget.max_usd_per_hour
    cap = "" if hourly is None else f"; at most {usd(hourly, 2)} per hour"
    if most is None or left is None:
        return f"no limit{cap}"
    words = (
        f"{usd(most, 2)}, {usd(left, 2)} left"
        if left >= 0
        else f"{usd(most, 2)}, exceeded by {usd(-left, 2)}"
    )
    if budget.hours_left is not None:
        words += f": {duration(3600 * budget.hours_left)} at this rate"
    return words + cap


def _by_cause(report: CostReport, money: Usd) -> list[tuple[str, ...]]:
    """Return rows of what the machines' time was good for, and the rest; the last one is the total."""

    def row(label: str, of: Callable[[MachineCost], float]) -> tuple[str, ...]:
        pools = [_sum(of(m) for m in report.machines if m.pool == pool) for pool in ("reserved", "spot")]
        return label, *(money(amount) for amount in (*pools, _sum(pools)))

    rows = [row("useful", lambda m: m.useful_usd)]
    rows += [row(kind, _wasted(kind)) for kind in report.wasted_usd]
    rows += [(kind, "-", "-", money(amount)) for kind, amount in report.other_usd.items() if amount]
    compute = report.compute_usd
    return [*rows, ("total", money(compute["reserved"]), money(compute["spot"]), money(report.total_usd))]


def _wasted(kind: str) -> Callable[[MachineCost], float]:
    return lambda machine: machine.wasted_usd[kind]


def _on_demand(found: Counterfactual) -> list[str]:
    if found.saving_fraction is None:
        return _wrapped("on-demand ", found.basis)
    saving, alone = found.saving_fraction, found.usd_per_million_tokens
    words = f"{saving:.1%} saved" if saving >= 0 else f"spot cost {-saving:.1%} more"
    ours = None if alone is None else usd(alone * (1 - saving), 2)
    line = f"{usd(alone, 2)} per million tokens; these steps cost {ours}: {words}"
    return [*_wrapped("on-demand ", line), *_wrapped(" " * 10, found.basis)]


def _planned(found: PlanComparison | None, money: Usd) -> list[str]:
    """Return what the plan said at the launch, and by what the bill differs."""
    if found is None:
        return []
    more = found.actual_usd - found.planned_usd
    words = f"{money(found.planned_usd)} in {duration(3600 * found.planned_hours)} at the launch"
    words += f"; the bill is {money(abs(more))} {'more' if more >= 0 else 'less'}"
    least = 0.005 * max(found.actual_usd, found.planned_usd)
    causes = [
        f"{name.replace('_', ' ')} {'+' if amount >= 0 else '-'}{money(abs(amount))}"
        for name, amount in asdict(found.difference_usd).items()
        if abs(amount) > least
    ]
    rest = sum(amount for amount in asdict(found.difference_usd).values() if abs(amount) <= least)
    if causes and round(rest, 4):
        causes.append(f"others {'+' if rest >= 0 else '-'}{money(abs(rest))}")
    return _wrapped("plan      ", f"{words}: {', '.join(causes)}" if causes else words)


# --- steps -------------------------------------------------------------------------------------------------


def _steps(report: CostReport, money: Usd) -> list[str]:
    """Return a table of steps, several to a line where there are many; it adds up to the total."""
    steps, outside = report.steps, report.outside_steps_usd
    if not steps:
        return []
    per_line = -(-len(steps) // MAX_STEP_LINES)
    rows: list[tuple[str | None, ...]] = [
        _span(steps[at : at + per_line], money) for at in range(0, len(steps), per_line)
    ]
    if outside.before:
        rows.insert(0, ("before", None, None, money(outside.before), None, None))
    if outside.restarts:
        rows.append(("resuming", None, None, money(outside.restarts), None, None))
    if outside.after:
        rows.append(("after", None, None, money(outside.after), None, None))
    headers = ("step", "seconds", "tokens", "cost", "per million", "reward")
    return table(headers, rows).splitlines()


def _span(steps: Sequence[StepCost], money: Usd) -> tuple[str, ...]:
    first, last = steps[0].step + 1, steps[-1].step + 1
    cost, tokens = _sum(s.usd for s in steps), sum(s.tokens for s in steps)
    rewards = [s.reward_mean for s in steps if s.reward_mean is not None]
    return (
        str(first) if first == last else f"{first}-{last}",
        f"{sum(s.seconds for s in steps):,.1f}",
        f"{tokens:,}",
        money(cost),
        usd(cost / tokens * 1e6, 2) if tokens else "-",
        f"{sum(rewards) / len(rewards):.3f}" if rewards else "-",
    )


# --- machines ----------------------------------------------------------------------------------------------


def _offers(report: CostReport, money: Usd) -> list[str]:
    """Return a table of machines, those of one offer on one line, and the launches that were refused."""
    launched = [m for m in report.machines if m.started_at is not None]

    def offer(machine: MachineCost) -> tuple[str, str, str, float]:
        return machine.pool, machine.zone, machine.accelerator, machine.price_usd_per_hour

    rows = []
    for (pool, zone, accelerator, price), found in groupby(sorted(launched, key=offer), offer):
        machines = list(found)
        billed, spent = duration(sum(m.billed_s for m in machines)), money(_sum(m.cost_usd for m in machines))
        rows.append((pool, zone, accelerator, str(len(machines)), billed, usd(price, 2), spent))
    headers = ("pool", "zone", "accelerator", "machines", "billed", "per hour", "cost")
    lines = table(headers, rows).splitlines() if rows else []
    refused = sum(m.state == "failed" for m in report.machines)
    if refused:
        lines.append(
            f"{refused} launch {'attempt' if refused == 1 else 'attempts'} failed (no capacity), not billed"
        )
    return lines


def _sum(amounts: Iterable[float]) -> float:
    """Add dollars as the micro-dollars that they stand for."""
    micro_usd = sum(round(amount * 1_000_000) for amount in amounts)
    return micro_usd / 1_000_000


def _wrapped(label: str, words: str) -> list[str]:
    return textwrap.wrap(
        words,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * min(len(label), 10),
        break_on_hyphens=False,
    )


WASTE = ("boot", "idle", "lost", "redone")
COLUMNS = (
    "kind", "id", "pool", "zone", "started_at", "ended_at", "seconds", "tokens", "reward_mean",
    "price_usd_per_hour", "usd", "useful_usd", *(f"{kind}_usd" for kind in WASTE),
)  # fmt: skip


def cost_csv(report: CostReport) -> str:
    """Return the table; no newline at its end."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(report))
    return out.getvalue().rstrip("\n")


def _rows(report: CostReport) -> Iterator[dict[str, Any]]:
    for machine in report.machines:
        yield {
            "kind": "machine",
            "id": machine.id,
            "pool": machine.pool,
            "zone": machine.zone,
            **_times(machine),
            "seconds": machine.billed_s,
            "price_usd_per_hour": _usd(machine.price_usd_per_hour),
            "usd": _usd(machine.cost_usd),
            "useful_usd": _usd(machine.useful_usd),
            **{f"{kind}_usd": _usd(machine.wasted_usd[kind]) for kind in WASTE},
        }
    for kind, amount in report.other_usd.items():
        yield {"kind": "other", "id": kind, "usd": _usd(amount)}
    for step in report.steps:
        yield {
            "kind": "step",
            "id": step.step + 1,
            **_times(step),
            "seconds": step.seconds,
            "tokens": step.tokens,
            "reward_mean": step.reward_mean,
            "usd": _usd(step.usd),
        }
    for when in ("before", "restarts", "after"):
        yield {"kind": "outside", "id": when, "usd": _usd(getattr(report.outside_steps_usd, when))}


def _times(row: MachineCost | StepCost) -> dict[str, str]:
    return {"started_at": _time(row.started_at), "ended_at": _time(row.ended_at)}


def _time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds")


def _usd(amount: float) -> str:
    return f"{amount:.6f}"
