"""A run's metrics as text: a table with a small chart of each, JSON and CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rlboost_cli.terminal.text import counted
from rlboost_runtime.health.glossary import Metric, described

if TYPE_CHECKING:
    from rlboost_cli.runs.metrics import MetricHistory
    from rlboost_cli.terminal.screen import Glyphs

_FIGURE = 9
"""Columns of a figure."""
_LEAST_CHART = 8


def metric_lines(history: MetricHistory, names: Sequence[str], glyphs: Glyphs, width: int) -> Iterator[str]:
    """Yield a table of at most `width` columns: a row per metric, and below it what the metric means."""
    if not history.steps:
        yield f"{history.run}: no metrics, as no step is trained"
        return
    first, last = history.steps[0], history.steps[-1]
    label = max([len("metric"), *(len(name) for name in names)])
    room = width - label - 3 * (_FIGURE + 2) - 2
    columns = ("first", "last", "best")
    span = f"steps {first} to {last}" if last > first else f"step {first}"
    yield f"{history.run}: {counted(len(history.steps), 'step')} trained"
    yield ""
    yield _cut(f"{'metric':<{label}}{''.join(f'  {c:>{_FIGURE}}' for c in columns)}  {span}", width)
    for name in names:
        metric, values = described(name), history.values(name)
        figures = "".join(f"  {_figure(value):>{_FIGURE}}" for value in _summary(metric, values))
        chart = glyphs.sparkline(resampled(values, max(_LEAST_CHART, room)), max(_LEAST_CHART, room))
        yield _cut(f"{name:<{label}}{figures}  {chart}".rstrip(), width)
        yield from _wrapped(_meaning(metric), width)
        if len(names) == 1 and metric.advice:
            yield from _wrapped(f"Otherwise: {metric.advice}", width)


def metrics_json(history: MetricHistory, names: Sequence[str]) -> dict[str, Any]:
    """Return the metrics as JSON: a value per step, null where there is none."""
    return {
        "run": history.run,
        "steps": history.steps,
        "metrics": {name: _entry(described(name), history.values(name)) for name in names},
    }


def metrics_csv(history: MetricHistory, names: Sequence[str]) -> str:
    """Return a CSV table: a row per step, a column per metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *names])
    columns = [history.values(name) for name in names]
    for index, step in enumerate(history.steps):
        writer.writerow([step, *("" if c[index] is None else c[index] for c in columns)])
    return text.getvalue().rstrip("\n")


def resampled(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most `width` values: means of neighbours where there are more."""
    known = [value for value in values if value is not None]
    if len(known) <= width:
        return list(known)
    edges = [round(i * len(known) / width) for i in range(width + 1)]
    return [fmean(known[edges[i] : edges[i + 1]]) for i in range(width)]


def _summary(metric: Metric, values: Sequence[float | None]) -> tuple[float | None, ...]:
    known = [value for value in values if value is not None]
    if not known:
        return None, None, None
    best = {"high": max, "low": min}.get(metric.better)
    return known[0], known[-1], None if best is None else best(known)


def _entry(metric: Metric, values: list[float | None]) -> dict[str, Any]:
    first, last, best = _summary(metric, values)
    return {
        "unit": metric.unit,
        "meaning": metric.meaning,
        "first": first,
        "last": last,
        "best": best,
        "values": values,
    }


def _meaning(metric: Metric) -> str:
    unit = f" Unit: {metric.unit}." if metric.unit else ""
    healthy = f" Healthy: {metric.healthy}." if metric.healthy else ""
    return f"{metric.meaning}{unit}{healthy}"


def _wrapped(words: str, width: int) -> list[str]:
    return textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="  ")


def _figure(value: float | None) -> str:
    """Return a figure on at most `_FIGURE` columns."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        return f"{value:.2e}"
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if size >= 10 else f"{value:.4f}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[:width].rstrip()
