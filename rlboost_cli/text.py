"""Statuses and cost reports as lines for a person: pure, without colour, tolerant of missing keys."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlboost_cli.run_status import RunStatus

INSTANCE_HEADERS = ("instance", "pool", "state", "version", "in flight", "tokens/s", "up")

_SPARKS = "▁▂▃▄▅▆▇█"
_ENDED = ("done", "failed", "stopped")

Json = dict[str, Any]  # an object of design section 6: which keys are there depends on who wrote it


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an aligned table: numbers to the right, None as a dash."""
    cells = [list(headers), *([dash(value) for value in row] for row in rows)]
    columns = range(len(headers))
    widths = [max(len(row[i]) for row in cells) for i in columns]
    is_right = [len(cells) > 1 and all(_is_number(row[i]) for row in cells[1:]) for i in columns]
    return "\n".join(
        "  ".join(
            row[i].rjust(widths[i]) if is_right[i] else row[i].ljust(widths[i]) for i in columns
        ).rstrip()
        for row in cells
    )


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Return the last `width` values as a line of bars, from the least to the greatest among them."""
    shown = [v for v in values if v is not None][-width:]
    if not shown:
        return ""
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return "".join(_SPARKS[min(7, int((v - low) / span * 8))] for v in shown)


def dash(value: object) -> str:
    """Return the text of a value; a dash where there is none."""
    return "-" if value is None else str(value)


def usd(value: float | None, places: int = 4) -> str:
    """Return dollars."""
    return "-" if value is None else f"${value:,.{places}f}"


def duration(seconds: float) -> str:
    """Return a length of time in its handiest unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- runs and their status ---------------------------------------------------------------------------------


def runs_table(rows: Sequence[Json]) -> str:
    """Return the list of runs."""
    return table(("run", "state", "step", "reward", "spent"), (_run(row) for row in rows))


def staleness(found: RunStatus) -> list[str]:
    """Return what to say where the coordinator or the supervisor is gone; empty where all is well."""
    name = found.data.get("run", "RUN")
    if found.problem is None and not found.is_supervised:
        return [
            "the run goes on, but its supervisor is gone: a process that fails now stays down",
            f"rlboost launch {name} starts the supervisor again; rlboost down {name} ends the run",
        ]
    if found.problem is None:
        return []
    return [
        f"{found.problem}; what follows is {duration(found.age_s)} old",
        f"rlboost launch {name} starts it again; rlboost down {name} ends the run",
    ]


def status_lines(status: Json) -> list[str]:
    """Return one run's status."""
    lines = summary_lines(status)
    if instances := status.get("instances"):
        lines += ["", table(INSTANCE_HEADERS, instance_rows(instances))]
    outcome = status.get("outcome") or {}
    if outcome.get("problem"):
        lines += ["", f"{outcome['problem']}; {outcome.get('remedy', '')}"]
    events = event_lines(status)
    return [*lines, "", *events] if events else lines


def summary_lines(status: Json) -> list[str]:
    """Return the first lines of a status: where the run is, what it earns and what it costs."""
    phase, state = status.get("phase"), str(status.get("state", "unknown"))
    rewards = sparkline(status.get("reward_history") or [])
    lines = [
        f"{status.get('run', '')}: {state}" + (f", {phase}" if phase and phase != state else ""),
        f"step     {status.get('step', 0)}/{status.get('steps', '?')},"
        f" policy version {dash(status.get('policy_version'))}, {tokens_per_s(status)}",
        f"reward   {_figure(status.get('reward_mean'))}  {rewards}".rstrip(),
        _rollout(status),
        _cost(status.get("cost") or {}),
    ]
    if problem := status.get("journal_problem"):
        lines.append(f"warning  the token journal cannot be written: {problem}")
    return lines


def tokens_per_s(status: Json) -> str:
    """Return the run's generation rate."""
    return f"{float(status.get('tokens_per_s') or 0):,.0f} tokens/s"


def instance_rows(instances: Sequence[Json]) -> list[tuple[object, ...]]:
    """Return a row under `INSTANCE_HEADERS` per instance."""
    return [
        (
            i.get("id", "?"),
            i.get("pool"),
            i.get("state"),
            i.get("policy_version"),
            i.get("in_flight", 0),
            f"{float(i.get('tokens_per_s') or 0):,.0f}",
            duration(float(i.get("uptime_s") or 0)),
        )
        for i in instances
    ]


def event_lines(status: Json, last: int = 8) -> list[str]:
    """Return the last events in words."""
    return [event_line(event) for event in (status.get("events") or [])[-last:]]


def event_line(event: Json) -> str:
    """Return one event: when, and what."""
    at = time.strftime("%H:%M:%S", time.localtime(float(event.get("at", 0))))
    return f"{at} {event.get('text') or event.get('kind', '')}"


def _run(row: Json) -> tuple[object, ...]:
    lives = row["running"] or row["state"] in _ENDED
    state = row["state"] + ("" if lives else " (not running)")
    step = f"{row['step']}/{dash(row['steps'])}"
    return row["run"], state, step, _figure(row["reward_mean"]), usd(row["spent_usd"])


def _rollout(status: Json) -> str:
    responses, tokens = status.get("responses") or {}, status.get("tokens") or {}
    preemptions = sum(int(number) for number in (status.get("preemptions") or {}).values())
    return (
        f"rollout  {responses.get('in_flight', 0)} in flight, {responses.get('finished', 0)} finished,"
        f" {responses.get('migrated', 0)} migrated; {preemptions} preemptions,"
        f" {tokens.get('lost_estimate', 0)} tokens lost"
    )


def _cost(cost: Json) -> str:
    budget = "" if cost.get("budget_usd") is None else f" of {usd(cost['budget_usd'], 2)}"
    rate = usd(cost.get("rate_usd_per_hour", 0.0))
    return f"cost     {usd(cost.get('spent_usd', 0.0))}{budget}, {rate} per hour"


# --- cost report -------------------------------------------------------------------------------------------


def cost_lines(report: Json) -> list[str]:
    """Return the cost report."""
    compute, other, wasted = report["compute_usd"], report["other_usd"], report["wasted_usd"]
    per_million = report["usd_per_million_tokens"]
    rate = "" if per_million is None else f", {usd(per_million)} per million"
    lines = [
        f"{report['run']}: {usd(report['total_usd'], 6)} in all",
        f"  machines   reserved {usd(compute['reserved'], 6)}, spot {usd(compute['spot'], 6)}",
        f"  other      egress {usd(other['egress'], 6)}, storage {usd(other['storage'], 6)}",
        f"  wasted     {', '.join(f'{kind} {usd(amount, 6)}' for kind, amount in wasted.items())}",
        f"  tokens     {report['tokens_trained']:,} trained{rate}",
        *_on_demand(report["counterfactual"]),
    ]
    machines = [m for m in report["machines"] if m.get("state") != "failed"]
    if machines:
        headers = ("machine", "pool", "state", "billed s", "per hour", "cost")
        lines += ["", table(headers, (_machine(machine) for machine in machines))]
    if refused := len(report["machines"]) - len(machines):
        lines.append(f"and {refused} launches that the provider refused, at no cost")
    return [*lines, *(f"note: {note}" for note in report["notes"])]


def cost_csv(report: Json) -> str:
    """Return one line per machine and per other cost; the last column adds up to the total."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("id", "pool", "started_at", "ended_at", "billed_s", "price_usd_per_hour", "cost_usd"))
    for m in report["machines"]:
        money = (f"{m['price_usd_per_hour']:.6f}", f"{m['cost_usd']:.6f}")
        writer.writerow((m["id"], m["pool"], m["started_at"], m["ended_at"], m["billed_s"], *money))
    for kind, amount in report["other_usd"].items():
        writer.writerow((kind, "other", None, None, None, None, f"{amount:.6f}"))
    return out.getvalue().rstrip("\n")


def _on_demand(found: Json) -> list[str]:
    lines = [f"             {found['basis']}"]
    if found["saving_fraction"] is None:
        return [f"  on-demand  {found['basis']}"]
    per_million, saving = usd(found["usd_per_million_tokens"]), found["saving_fraction"]
    words = f"{saving:.1%} saved" if saving >= 0 else f"spot cost {-saving:.1%} more"
    return [f"  on-demand  {per_million} per million: {words}", *lines]


def _machine(machine: Json) -> tuple[object, ...]:
    return (
        machine["id"],
        machine["pool"],
        machine["state"],
        f"{machine['billed_s']:.1f}",
        usd(machine["price_usd_per_hour"]),
        usd(machine["cost_usd"], 6),
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _is_number(text: str) -> bool:
    return text.lstrip("$-").replace(",", "").replace(".", "").isdigit() or text == "-"
