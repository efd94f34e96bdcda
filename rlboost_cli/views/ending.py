"""What is said when a run has ended: how it went, what it cost, what to type next."""

from __future__ import annotations

import re
from typing import Any

from rlboost_cli.terminal.text import duration, usd
from rlboost_runtime.protocol.reward_failures import FailureCount

Json = dict[str, Any]  # an object of design section 6


def ended_lines(name: str, state: str, status: Json, report: Json) -> list[str]:
    """Return a summary and a short cost report."""
    lines = [f"{name} {'is ' if state == 'done' else ''}{state}{_how_far(status)}"]
    if learnt := _reward(status.get("reward_history") or []):
        lines.append(_labelled("reward", learnt))
    if failures := _reward_failures(report.get("rewards") or {}):
        lines.append(_labelled("", failures))
    lines += [_labelled("spot" if i == 0 else "", text) for i, text in enumerate(_survived(status))]
    return [*lines, *_cost(report)]


def next_lines(name: str, state: str, model: str, num_steps: int) -> list[str]:
    """Return what can be typed now, after `num_steps` trained steps."""
    cost = (f"rlboost cost {name}", "every step, every machine")
    logs = (f"rlboost logs {name}", "what its processes said")
    goes_on = "goes on from the last checkpoint" if num_steps else "begins again"
    resume = (f"rlboost launch {name} --resume", goes_on)
    choices = [cost, logs] if state == "done" else [logs, resume]
    width = max(len(typed) for typed, _ in choices)
    lines = [_labelled("model", model)] if state == "done" else []
    return lines + [
        _labelled("" if i else "next", f"{typed:<{width}}  {does}") for i, (typed, does) in enumerate(choices)
    ]


def _how_far(status: Json) -> str:
    step, steps = int(status.get("step") or 0), status.get("steps")
    if steps is None:
        return ""
    took = ""
    if status.get("started_at") is not None and status.get("at") is not None:
        took = f" in {duration(float(status['at']) - float(status['started_at']))}"
    return f": {step} of {steps} steps{took}"


def _reward(history: list[float]) -> str:
    if len(history) < 2:
        return ""
    span = min(5, len(history) // 2)
    first, last = sum(history[:span]) / span, sum(history[-span:]) / span
    which = f"{span} steps" if span > 1 else "step"
    return f"{first:.3f} -> {last:.3f} (first and last {which})"


def _reward_failures(rewards: Json) -> str:
    count = FailureCount.from_json(rewards)
    return count.in_words() if count.failed else ""


def _survived(status: Json) -> list[str]:
    losses = status.get("preemptions") or {}
    total = sum(int(n) for n in losses.values())
    if total == 0:
        return []
    responses, tokens = status.get("responses") or {}, status.get("tokens") or {}
    what = "1 preemption" if total == 1 else f"{total:,} preemptions"
    migrated, lost = int(responses.get("migrated") or 0), int(tokens.get("lost_estimate") or 0)
    first = f"{what} survived, {int(losses.get('noticed') or 0):,} with notice"
    return [first, f"{migrated:,} responses migrated, about {lost:,} tokens lost"] if migrated else [first]


def _cost(report: Json) -> list[str]:
    compute, found = report.get("compute_usd") or {}, report.get("counterfactual") or {}
    pools = ", ".join(f"{pool} {usd(amount, 2)}" for pool, amount in compute.items())
    lines = [_labelled("cost", f"{usd(report.get('total_usd'), 2)}" + (f" ({pools})" if pools else ""))]
    per_million, saving = report.get("usd_per_million_tokens"), found.get("saving_fraction")
    if per_million is not None:
        lines.append(_labelled("", f"{usd(per_million, 2)} per million tokens trained"))
    if saving is not None:
        basis = re.split(r"[,:;]", str(found.get("basis") or "estimated"))[0]
        words = f"{saving:.0%} saved" if saving >= 0 else f"spot cost {-saving:.0%} more"
        alone = usd(found.get("usd_per_million_tokens"), 2)
        lines.append(_labelled("", f"on demand only ({basis}): {alone} per million, {words}"))
    return lines


def _labelled(label: str, text: str) -> str:
    return f"{label:<9}{text}".rstrip()
