"""A run's `metrics.jsonl`: the steps, and which metrics of them are asked for.

Steps count from 1 here, as in every command.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.health.glossary import GLOSSARY, IMPORTANT, is_important, similar
from rlboost_runtime.run.folder import RunFolder

REFERENCE_KL = "reference_kl"
"""Of interest only where the job has a reference."""
COMPUTED = "tokens_per_s"
"""The one metric that is not in the file."""


@dataclass(frozen=True, slots=True)
class MetricHistory:
    """The metrics of a run's trained steps."""

    run: str
    steps: list[int]
    rows: list[dict[str, float]]
    """One per step; a metric that the step does not have is missing."""

    def values(self, name: str) -> list[float | None]:
        """Return a metric's value per step; None where there is none, or none that is finite."""
        found = (row.get(name) for row in self.rows)
        return [value if value is not None and math.isfinite(value) else None for value in found]

    def chosen(self, names: list[str], *, every: bool = False) -> list[str]:
        """Return the metrics to show: `names`, else the important ones that the run has, or `every` one.
        Raises `ConfigError` for a name that nobody knows."""
        written = list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))
        for name in names:
            if name not in written and name not in GLOSSARY:
                near = similar(name, written)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise ConfigError(f"there is no metric {name}", f"{hint}docs/metrics.md lists all metrics")
        if names:
            return list(dict.fromkeys(names))
        if every:
            return written
        others = [name for name in written if is_important(name) and name not in IMPORTANT]
        if any(row.get(REFERENCE_KL) for row in self.rows):  # 0 throughout: the job has no reference
            others.append(REFERENCE_KL)
        return [name for name in IMPORTANT if name in written] + others


def history_of(run: RunFolder) -> MetricHistory:
    """Return the metrics of the run so far; no steps where none is trained yet."""
    try:
        written = run.metrics.read_text(encoding="utf-8")
    except FileNotFoundError:
        written = ""
    by_step: dict[int, dict[str, float]] = {}
    for text in written.split("\n"):
        row = _row(text)
        if row is not None:
            by_step[int(row["step"]) + 1] = row
    steps = sorted(by_step)
    return MetricHistory(run.name, steps, [by_step[step] for step in steps])


def _row(text: str) -> dict[str, float] | None:
    """Return a line's figures; None for the end of the file, or a line that is being written."""
    try:
        line: Any = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), (int, float)):
        return None
    row = {name: float(value) for name, value in line.items() if isinstance(value, (int, float))}
    tokens, seconds = row.get("tokens_trained"), row.get("step_s")
    if tokens is not None and seconds:
        row[COMPUTED] = tokens / seconds
    return row
