"""A run in a few lines of Markdown, to paste into a chat."""

from __future__ import annotations

from typing import Any

import msgspec

from rlboost_cli.terminal.text import against_on_demand, duration, usd
from rlboost_cli.views.health import evaluation_course
from rlboost_runtime.billing.report import CostReport
from rlboost_runtime.protocol.status import Status, read_status


def markdown(data: dict[str, Any]) -> str:
    """Return the summary of the run whose `run_data` is given."""
    status, report = read_status(data["status"]), msgspec.convert(data["cost"], CostReport)
    rows = [*_progress(status), *_money(report), *_fleet(status, len(report.machines))]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    warnings = "".join(f"\n- {each.text}" for each in status.warnings)
    return f"**{data['run']}**: {status.state}\n\n| | |\n|---|---|\n{table}\n{warnings}".rstrip()


def _progress(status: Status) -> list[tuple[str, str]]:
    took = ""
    if status.started_at is not None and status.at is not None:
        took = f" in {duration(status.at - status.started_at)}"
    rows = [("forked from", ", from ".join(status.ancestors))] if status.ancestors else []
    if status.serving is not None:
        return [*rows, ("requests answered", f"{status.serving.finished:,}{took}"),
                ("tokens served", f"{status.serving.tokens:,}")]  # fmt: skip
    rows += [("steps", f"{status.step} of {status.steps or '?'}{took}")]
    rewards = [reward for reward in status.reward_history if reward is not None]
    if rewards:
        rows.append(("mean reward, first and last step", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"))
    rows += [("evaluation", evaluation_course(each)) for each in status.evaluations]
    return [*rows, ("tokens trained", f"{status.tokens.trained:,}")]


def _money(report: CostReport) -> list[tuple[str, str]]:
    rows = [("spent", usd(report.total_usd, 2))]
    if report.usd_per_million_tokens is not None:
        rows.append(("per million tokens", usd(report.usd_per_million_tokens, 2)))
    other = report.counterfactual
    compared = against_on_demand(other.usd_per_million_tokens, other.saving_fraction, other.basis)
    return [*rows, ("compared per million", compared)] if compared else rows


def _fleet(status: Status, num_machines: int) -> list[tuple[str, str]]:
    lost = status.preemptions
    return [
        ("machines", f"{num_machines:,}"),
        ("preemptions survived", f"{lost.total:,}, {lost.noticed:,} with notice"),
        (
            "responses migrated",
            f"{status.responses.migrated:,}, about {status.tokens.lost_estimate:,} tokens lost",
        ),
    ]
