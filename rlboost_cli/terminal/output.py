"""What every command prints: answers on standard output, everything else on standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import typer

from rlboost_cli.terminal import text
from rlboost_cli.terminal.screen import between_words, can_redraw
from rlboost_runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlboost_cli.terminal.working import Working


_waiting: Working | None = None
"""The last spinner: it makes room for other lines."""


def show(words: str) -> None:
    """Print a piece of the answer."""
    print(words, flush=True)


def progress(words: str) -> None:
    """Print something beside the answer, on standard error."""
    with _waiting.aside() if _waiting is not None else nullcontext():
        print(between_words(words, sys.stderr), file=sys.stderr, flush=True)


def as_json(value: object) -> None:
    """Print one JSON object."""
    show(json.dumps(value, indent=1, allow_nan=False))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headers, numbers to the right: drawn by rich on a terminal, else as aligned text."""
    if not sys.stdout.isatty():
        show(text.table(headers, rows))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    cells = [[text.dash(value) for value in row] for row in rows]
    for column, header in enumerate(headers):
        numbers = bool(cells) and all(text.is_number(row[column]) for row in cells)
        drawn.add_column(header, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    Console().print(drawn)


def as_yaml(value: object) -> None:
    """Print plain data as YAML."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt", pure=True)  # keeps the order of keys
    yaml.default_flow_style = False
    yaml.dump(value, sys.stdout)


def is_terminal() -> bool:
    """Return True if a person reads standard output and can answer a question."""
    return sys.stdout.isatty() and sys.stdin.isatty()


def width() -> int | None:
    """Return the columns that a line of the answer may have; None where no terminal shows it."""
    return shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else None


def confirm(question: str) -> bool:
    """Ask; anything but yes is no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def require_consent(question: str | None, to: str) -> None:
    """Ask before money is spent; return where the answer is yes. `question`: None for a program, which is
    asked nothing. `to`: what is agreed to. Raises `ConfigError` where nobody can be asked, `typer.Exit` on
    no."""
    if question is None:
        raise ConfigError("this run costs money", f"pass yes=True to agree to {to}")
    if not is_terminal():
        raise ConfigError(
            "this run costs money and there is no terminal to confirm it on", f"add --yes to agree to {to}"
        )
    if not confirm(question):
        raise typer.Exit(0)


def working(words: str = "") -> Working:
    """Return a spinner for a wait; enter it as a context, and call it with what is being waited for."""
    from rlboost_cli.terminal.working import Working

    global _waiting
    width = shutil.get_terminal_size().columns
    _waiting = Working(sys.stderr, words, can_redraw=can_redraw(sys.stderr), width=width)
    return _waiting
