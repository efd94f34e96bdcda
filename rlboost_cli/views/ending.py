"""The summary of an ended run: how it went, what it cost, what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlboost_cli.terminal.text import (
    against_on_demand,
    counted,
    duration,
    labelled,
    left_lines,
    usd,
    usd_parts,
)
from rlboost_cli.views.health import evaluation_course, full_warnings
from rlboost_runtime.protocol.reward_failures import FailureCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlboost_runtime.billing.launch_records import MachineRecord
    from rlboost_runtime.billing.report import CostReport
    from rlboost_runtime.protocol.status import Status

SIMULATED = "rlboost simulate --preset paper-8b"
"""Compares policies, on-demand machines among them, for machines like the paper's."""
WIDTH = 80
"""Columns of the summary."""


def ended_lines(name: str, state: str, status: Status, report: CostReport) -> list[str]:
    """Return a summary and a short cost report."""
    lines = [f"{name} {'is ' if state == 'done' else ''}{state}{_how_far(status, report)}"]
    if course := _reward([r for r in status.reward_history if r is not None]):
        lines += labelled("reward", course)
    lines += labelled("eval", *(evaluation_course(each) for each in status.evaluations))
    if failures := _reward_failures(report.rewards):
        lines += labelled("", failures)
    lines += [*labelled("kept", *_survived(status)), *labelled("cost", *_cost(report))]
    return [*lines, *full_warnings(status.warnings, WIDTH)]


def next_lines(
    name: str, state: str, model: str, num_steps: int, *, is_local: bool = False, only_serves: bool = False
) -> list[str]:
    """Return what can be typed now, after `num_steps` trained steps. `is_local`: no machine of it was a GPU
    of a cloud, so its cost says nothing about such machines. `only_serves`: the run trained nothing."""
    cost = (f"rlboost cost {name}", "cost by step and machine")
    logs = (f"rlboost logs {name}", "process logs")
    goes_on = "continues from the last checkpoint" if num_steps else "starts over"
    resume = (f"rlboost launch {name} --resume", goes_on)
    if only_serves:
        resume = (f"rlboost serve {name} --resume", "serves it again")
    looks = [
        (f"rlboost metrics {name}", "curves, and what they mean"),
        (f"rlboost samples {name}", "what the model wrote"),
        cost,
        (f"rlboost dashboard {name}", "all of it on a page"),
    ]
    choices = looks if state == "done" else [logs, cost, resume]
    if is_local and state == "done":
        choices.append((SIMULATED, "larger GPUs, simulated"))
    width = max(len(typed) for typed, _ in choices)
    lines = labelled("model", model) if state == "done" else []
    return [*lines, *labelled("next", *(f"{typed:<{width}}  {does}" for typed, does in choices))]


def warning_lines(name: str, warning: str, left: Sequence[MachineRecord]) -> list[str]:
    """Return what may still cost money after the end of a run, and why; empty if that is nothing."""
    if not left:
        return []
    return [
        f"warning: {warning or 'not every machine is known to be gone'}",
        *labelled("left", *left_lines(left)),
        f"hint: rlboost down {name} asks the cloud again; rlboost gc does so for all runs",
    ]


def _how_far(status: Status, report: CostReport) -> str:
    if status.serving is not None:
        return f": {status.serving.finished:,} requests answered with {status.serving.tokens:,} tokens"
    if status.steps is None:
        return ""
    took = ""
    if status.started_at is not None and status.at is not None:
        took = f" in {duration(status.at - status.started_at)}"
        if any(machine.pool == "reserved" and machine.num_lives > 1 for machine in report.machines):
            took += ", with the time before it was resumed"
    return f": {status.step} of {status.steps} steps{took}"


def _reward(history: list[float]) -> str:
    if len(history) < 2:
        return ""
    span = min(5, len(history) // 2)
    first, last = sum(history[:span]) / span, sum(history[-span:]) / span
    which = f"{span} steps" if span > 1 else "step"
    gain = f", x{last / first:.2f}" if first > 0 else ""
    return f"{first:.3f} -> {last:.3f}{gain} (first and last {which})"


def _reward_failures(rewards: dict[str, int]) -> str:
    count = FailureCount.from_json(rewards)
    return count.in_words() if count.failed else ""


def _survived(status: Status) -> list[str]:
    if (total := status.preemptions.total) == 0:
        return []
    migrated, lost = status.responses.migrated, status.tokens.lost_estimate
    first = f"{counted(total, 'preemption')} survived, {status.preemptions.noticed:,} with notice"
    of = status.tokens.generated
    share = f" of {of:,} ({lost / of:.2%})" if of else ""
    kept = f"{migrated:,} responses migrated, about {lost:,} tokens lost{share}"
    return [first, kept] if migrated else [first]


def _useful(report: CostReport) -> list[str]:
    """Return the share of the machines' cost that was useful, and what took the most of the rest."""
    spent = report.useful_usd + sum(report.wasted_usd.values())
    if spent <= 0 or not report.wasted_usd:
        return []
    cause, most = max(report.wasted_usd.items(), key=lambda item: item[1])
    why = f"; most of the rest is {cause} ({most / spent:.0%})" if most else ""
    return [f"{report.useful_usd / spent:.0%} useful{why}"]


def _cost(report: CostReport) -> list[str]:
    found = report.counterfactual
    parts = {kind: amount for kind, amount in {**report.compute_usd, **report.other_usd}.items() if amount}
    words = usd_parts(report.total_usd, list(parts.values()))
    kinds = ", ".join(f"{kind} {amount}" for kind, amount in zip(parts, words, strict=True))
    lines = [f"{usd(report.total_usd, 2)} ({kinds})" if kinds else usd(report.total_usd, 2), *_useful(report)]
    per_million = report.usd_per_million_tokens
    if per_million is not None:
        what = "trained" if report.tokens_trained or not report.requests_served else "served"
        lines.append(f"{usd(per_million, 2)} per million tokens {what}, start-up and end included")
    compared = against_on_demand(found.usd_per_million_tokens, found.saving_fraction, found.basis)
    return [*lines, compared] if compared and per_million is not None else lines
