"""A comparison of runs as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlboost_cli.runs.compare import REWARD_STEPS, at_value
from rlboost_cli.terminal.text import dash, duration, table, usd
from rlboost_runtime.money import money_places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlboost_cli.runs.compare import OverSeeds, RunColumn, RunComparison, RunPoint

_MAX_VALUE = 30
"""Columns of a job field's value."""
_STEPS_SHOWN = 6
_MOST_BESIDE = 3
"""More runs than these are listed below one another."""


def compare_lines(found: RunComparison) -> Iterator[str]:
    """Yield what differs between the jobs, each run as it is now, and all of them at the same points."""
    names = [column.run for column in found.runs]
    if found.changed and len(names) > _MOST_BESIDE:
        below = [
            ("" if index else field, name, _value(values, name))
            for field, values in found.changed.items()
            for index, name in enumerate(names)
        ]
        yield table(("job field", "run", "value"), below)
    elif found.changed:
        rows: list[tuple[object, ...]] = [
            (field, *(_value(values, name) for name in names)) for field, values in found.changed.items()
        ]
        yield table(("job field", *names), rows)
    else:
        yield "The jobs are the same but for their names."
    yield ""
    yield table(_HEADERS, [_row(c.run, c.last, c.total_usd, c.state) for c in found.runs])
    for fork in (column for column in found.runs if column.ancestors):
        ancestors = ", from ".join(fork.ancestors)
        yield f"{fork.run} continues from {ancestors}: tokens, time and dollars are its own."
    yield f"reward: mean of the last {REWARD_STEPS} steps. time: since the first step's start."
    yield "spent, $/Mtok: all of the run. dollars: up to the step's end."
    if not found.same:
        waiting = ", ".join(c.run for c in found.runs if not c.curves.steps)
        yield f"\nNothing to compare yet: no trained step of {waiting}."
        return
    yield ""
    if found.over_seeds:
        yield from _over_seeds(found.over_seeds)
        yield ""
    yield from _by_step(found.runs, int(found.same["steps"].at))
    yield ""
    rows = [
        ("" if index else words, *_point_cells(run, at))
        for axis, words in _same_words(found).items()
        for index, (run, at) in enumerate(found.same[axis].runs.items())
    ]
    yield table(("at the same", "run", "step", "reward", "tokens", "time", "dollars"), rows)


_HEADERS = ("run", "state", "step", "reward", "held out", "tokens", "tok/s", "time", "spent", "$/Mtok")


def _row(run: str, last: RunPoint | None, spent: float, state: str) -> tuple[object, ...]:
    if last is None:
        return run, state, 0, None, None, 0, None, None, _money(spent), None
    return (
        *(run, state, last.step, _figure(last.reward_mean), _figure(last.eval_reward_mean)),
        *(f"{last.tokens:,}", _rate(last), duration(last.seconds), _money(spent)),
        usd(1e6 * spent / last.tokens if last.tokens else None),
    )


def _over_seeds(groups: Sequence[OverSeeds]) -> Iterator[str]:
    """Yield the mean and its standard error of runs that differ in their seed only."""
    rows = [
        (
            ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in group.fields.items())
            or "all",
            *(len(group.runs), group.step),
            _with_error(group.reward_mean, group.reward_error),
            _with_error(group.eval_reward_mean, group.eval_reward_error),
            _money(group.usd),
        )
        for group in groups
    ]
    yield table(("over seeds", "runs", "step", "reward", "held out", "dollars"), rows)
    yield "+-: standard error of the mean over the runs. dollars: their mean."


def _with_error(mean: float | None, error: float | None) -> str:
    return dash(None if mean is None or error is None else f"{mean:.3f} +- {error:.3f}")


def _by_step(columns: Sequence[RunColumn], last: int) -> Iterator[str]:
    """Yield reward, throughput and dollars at some steps that every run has reached."""
    first = max(column.curves.steps[0] for column in columns)
    span = last - first
    shown = sorted({first + round(i * span / (_STEPS_SHOWN - 1)) for i in range(_STEPS_SHOWN)})
    rows: list[tuple[object, ...]] = []
    for step in shown:
        for index, column in enumerate(columns):
            at = at_value(column.curves, "steps", step)
            cells = (None, None, None) if at is None else (_figure(at.reward_mean), _rate(at), _money(at.usd))
            rows.append(("" if index else step, column.run, *cells))
    yield table(("step", "run", "reward", "tok/s", "dollars"), rows)


def _same_words(found: RunComparison) -> dict[str, str]:
    same = found.same
    return {
        "steps": f"step {same['steps'].at:.0f}",
        "tokens": f"{same['tokens'].at:,.0f} tokens",
        "seconds": duration(same["seconds"].at),
        "usd": _money(same["usd"].at),
    }


def _point_cells(run: str, at: RunPoint | None) -> tuple[object, ...]:
    if at is None:
        return run, None, None, None, None, None
    return run, at.step, _figure(at.reward_mean), f"{at.tokens:,}", duration(at.seconds), _money(at.usd)


def _value(values: dict[str, object], name: str) -> str:
    if name not in values:
        return "-"
    value = values[name]
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


def _rate(at: RunPoint) -> str:
    return "-" if at.tokens_per_s is None else f"{at.tokens_per_s:,.0f}"


def _figure(value: float | None) -> str:
    return dash(None if value is None else f"{value:.3f}")


def _money(value: float) -> str:
    return usd(value, money_places(value))
