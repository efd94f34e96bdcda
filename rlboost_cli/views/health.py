"""Warnings and the newest evaluation as lines of text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rlboost_cli.terminal.text import labelled

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Return the newest evaluation in words."""
    best = "" if found.reward_best is None else f", best of each prompt {found.reward_best:.3f}"
    return f"{found.reward_mean:.3f} on held-out prompts at step {found.step}{best}"


def evaluation_course(found: EvaluationStatus) -> str:
    """Return how the evaluation changed over the run."""
    return f"{found.first_reward_mean:.3f} -> {found.reward_mean:.3f} (first and last evaluation)"
