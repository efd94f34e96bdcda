"""The attached view of one run, as something that rich can draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlboost_cli.text import (
    INSTANCE_HEADERS,
    event_lines,
    instance_rows,
    staleness,
    summary_lines,
)

if TYPE_CHECKING:
    from rlboost_cli.run_status import RunStatus

_STYLES = {"ready": "green", "serving": "green", "lost": "red", "gone": "red", "draining": "yellow"}


def render(status: RunStatus) -> RenderableType:
    """Return the view of one status."""
    title, *rest = summary_lines(status.data)
    parts: list[RenderableType] = [Text(title, style="bold"), *(Text(line) for line in rest)]
    parts += [Text(line, style="yellow") for line in staleness(status)]
    instances = status.data.get("instances") or []
    if instances:
        parts.append(_instances(instance_rows(instances)))
    parts += [Text(line, style="dim") for line in event_lines(status.data)]
    if not status.has_ended:
        parts.append(Text("Ctrl-C detaches; the run goes on", style="dim italic"))
    return Group(*parts)


def _instances(rows: list[tuple[object, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, header in enumerate(INSTANCE_HEADERS):
        table.add_column(header, justify="right" if index >= 3 else "left")
    for row in rows:
        cells = ["-" if value is None else str(value) for value in row]
        table.add_row(*cells, style=_STYLES.get(cells[2]))
    return table
