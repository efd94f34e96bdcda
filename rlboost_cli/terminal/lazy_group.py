"""A group of commands whose modules are imported when a command is called, not to list them.

The list of commands, with a sentence for each, comes from a table, so that `--help` imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from rlboost_cli.terminal.errors import explained

if TYPE_CHECKING:
    Command = Any  # typer 0.2x carries its own click under a private name

SETTINGS: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Of the program and of each command: plain help, and no tracebacks with local variables."""


def lazy_group(commands: dict[str, str]) -> type[TyperGroup]:
    """Return a group of `commands`: name to sentence; `name` is function `name` of `commands/name.py`."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes | {"commands": {}})
            self.commands = _Commands(tuple(commands))

        def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # their Context
            return list(commands)

        def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
            with formatter.section("Commands"):
                formatter.write_dl(list(commands.items()))

    return Group


class _Commands(MutableMapping[str, "Command"]):
    """Commands by name; each is imported when it is looked up."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._loaded: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._loaded:
            if name not in self._names:
                raise KeyError(name)
            self._loaded[name] = _load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _load(name: str) -> Command:
    function: Callable[..., None] = getattr(import_module(f"rlboost_cli.commands.{name}"), name)
    alone = typer.Typer(add_completion=False, **SETTINGS)
    alone.command(name)(explained(function))
    return get_command(alone)
