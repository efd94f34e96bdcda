"""Tables as rich draws them; imported only where standard output is a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rlboost_cli.terminal.text import dash, is_number


def rich_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Return rows under headers, numbers to the right; it gives way where the terminal is narrow."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    cells = [[dash(value) for value in row] for row in rows]
    for column, header in enumerate(headers):
        numbers = bool(cells) and all(is_number(row[column]) for row in cells)
        table.add_column(header, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    return table
