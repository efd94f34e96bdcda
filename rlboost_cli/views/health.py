"""Warnings and the newest evaluation as lines of text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rlboost_cli.terminal.text import labelled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlboost_runtime.protocol.status import EvaluationStatus, HealthWarning, Status

_LABEL = 9
"""Columns before the words of a summary."""


def short_warnings(status: Status) -> list[str]:
    """Return a line per warning in force, without what to do."""
    return labelled("warning", *(warning.text for warning in status.warnings))


def full_warnings(warnings: Sequence[HealthWarning], width: int) -> list[str]:
    """Return each warning with its reason and what to do, on lines of at most `width` columns."""
    room = max(40, width - _LABEL)
    lines: list[str] = []
    for number, warning in enumerate(warnings):
        words = [
            *textwrap.wrap(warning.text, room),
            *textwrap.wrap(f"{warning.reason} {warning.advice}", room, break_on_hyphens=False),
        ]
        lines += labelled("" if number else "warning", *words)
    return lines


def evaluation_words(found: EvaluationStatus) -> str:
    """Return an evaluation's newest results in words."""
    rates = "".join(f", {name} {value:.3f}" for name, value in evaluation_rates(found.values).items())
    lengths = f", {found.values['length_mean']:,.0f} tokens" if "length_mean" in found.values else ""
    after = f"after {found.updates} update{'s' * (found.updates != 1)}"
    return f"{_named(found)}reward {found.values.get('reward_mean', 0.0):.3f} {after}{rates}{lengths}"


def evaluation_course(found: EvaluationStatus) -> str:
    """Return how an evaluation changed over the run."""
    before, after = (each.get("reward_mean", 0.0) for each in (found.first, found.values))
    first = evaluation_rates(found.first)
    rates = "".join(
        f", {name} {first[name]:.3f} -> {value:.3f}"
        for name, value in evaluation_rates(found.values).items()
        if name in first
    )
    return f"{_named(found)}reward {before:.3f} -> {after:.3f}{rates} (first and last evaluation)"


def evaluation_rates(values: Mapping[str, float]) -> dict[str, float]:
    """Return avg@k, and the last pass@k, which is that of the largest k unless the job says otherwise."""
    last = {name.partition("_at_")[0]: name for name in values if "_at_" in name}
    return {name.replace("_at_", "@"): values[name] for name in last.values()}


def _named(found: EvaluationStatus) -> str:
    return f"{found.name}: " if found.name else ""
