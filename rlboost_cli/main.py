"""The `rlboost` program: which commands there are. Importing this loads nothing heavy, and no command.

The list of commands, with a sentence for each, is a table, so `--help` imports none of their modules:
a command's module is imported when the command is called.

Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity, 5 budget
reached, 6 credentials or quota, 7 cloud unreachable, 8 rented GPUs cannot be used, 130 interrupted before
there was a run.
"""

from __future__ import annotations

import os
import sys
from collections import UserDict
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from rlboost_cli.terminal.errors import as_json, explained, render
from rlboost_runtime.errors import ConfigError

if TYPE_CHECKING:
    Command = Any  # typer 0.2x carries its own click under a private name

SETTINGS: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Of the program and of each command: plain help, and no tracebacks with local variables."""


_ELSEWHERE = {"attach": "launch", "run": "launch", "stop": "down", "ls": "status", "ps": "status"}
"""What other programs call a command of ours that is spelled quite differently."""


def lazy_group(commands: dict[str, str]) -> type[TyperGroup]:
    """Return a group of `commands`: name to sentence; `name` is function `name` of its module."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes | {"commands": {}})
            self.commands = _Commands(dict.fromkeys(commands))

        def main(self, args: Any = None, *more: Any, **extra: Any) -> Any:
            try:
                code = super().main(args, *more, **extra | {"standalone_mode": False})
            except _UsageError as mistake:
                code = _refused(mistake, is_json="--json" in (sys.argv[1:] if args is None else args))
            raise SystemExit(code)

        def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
            if meant := _ELSEWHERE.get(args[0]):
                ctx.fail(f"No such command '{args[0]}'. Did you mean '{meant}'?")
            return super().resolve_command(ctx, args)

        def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # their Context
            return list(commands)

        def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
            with formatter.section("Commands"):
                formatter.write_dl(list(commands.items()))

    return Group


_UsageError: Any = typer.BadParameter.__mro__[1]
"""Any mistake in what was typed; typer 0.2x keeps the class under a private name."""


def _refused(mistake: Any, *, is_json: bool) -> int:
    """Show it as every other error is shown; return the exit code."""
    if type(mistake).__name__ == "NoArgsIsHelpError":
        mistake.show()
    else:
        words = mistake.format_message().rstrip(".")
        asked = f"{mistake.ctx.command_path} --help" if mistake.ctx else "rlboost --help"
        error = ConfigError(f"{words[:1].lower()}{words[1:]}", asked)
        typer.echo(as_json(error) if is_json else render(error), err=True)
    return int(mistake.exit_code)


class _Commands(UserDict[str, "Command"]):
    """Commands by name; each is imported when it is looked up."""

    def __getitem__(self, name: str) -> Command:
        if self.data[name] is None:
            self.data[name] = _load(name)
        return self.data[name]


def _load(name: str) -> Command:
    function: Callable[..., None] = getattr(import_module(module_of(name)), name)
    alone = typer.Typer(add_completion=False, **SETTINGS)
    alone.command(name)(explained(function))
    return get_command(alone)


# NAME is function NAME of commands/MODULE.py; a test compares the words with its docstring
_MODULES: dict[str, dict[str, str]] = {
    "job": {
        "init": "Write a commented job file to start from",
        "tasks": "Print the tasks of a taskset of verifiers as rows of a data file",
        "check": "Validate a job file and print the resolved job",
        "schema": "Print the JSON Schema of job files, for editors",
        "doctor": "Check this machine, the job and its remote head",
        "plan": "Forecast a job's time and cost, and compare alternatives",
    },
    "account": {
        "acceptance": "Try a cloud account with real machines, within a budget, and write a report",
        "budget": "Have a cloud send mail when your machines cost too much in a month",
    },
    "image": {
        "image": "Make, list or delete machine images with torch, vLLM and RLBoost installed",
    },
    "start": {
        "up": "Start a run without its trainer",
        "launch": "Start or continue a run and watch it; Ctrl-C detaches",
        "serve": "Serve a model from spot machines with an on-demand floor; Ctrl-C detaches",
        "generate": "Answer a file of requests by a run's fleet, each once",
    },
    "watch": {
        "status": "Show all runs, or one run in detail",
        "logs": "Show a run's logs, including those of ended machines",
        "samples": "Show a step's best, median and worst responses",
        "metrics": "Show a run's metrics, with a chart of each",
        "cost": "Show what a run costs, on what, and what it would have cost on demand",
        "compare": "Compare runs: changed job fields, and reward, speed and dollars at the same step",
        "audit": "Verify a run's guarantees from its event log and token journal",
    },
    "share": {
        "dashboard": "Show runs in a browser: curves, machines, samples and the bill, live",
        "report": "Write a run's curves, machines, samples and bill into one HTML file",
    },
    "machine": {
        "ssh": "Open a shell on a run's head or on one of its machines",
    },
    "end": {
        "preempt": "Preempt one instance, as its cloud would",
        "chaos": "Kill and pause parts of a run at random, then audit what it made",
        "down": "Stop a run, release its machines and show what it cost",
        "rm": "Delete ended runs, with their checkpoints and logs",
        "gc": "Find and terminate orphaned machines",
    },
    "market": {
        "prices": "Show what GPU machines cost, spot and on demand, cheapest first",
        "simulate": "Replay a spot market under a virtual clock and compare policies",
        "traces": "List, show or fetch recorded spot markets to simulate on",
    },
}
COMMANDS = {name: sentence for commands in _MODULES.values() for name, sentence in commands.items()}
"""Each command with a sentence for `--help`, in the order shown."""


def module_of(name: str) -> str:
    """Return the module in which command `name` lives."""
    module = next(module for module, commands in _MODULES.items() if name in commands)
    return f"rlboost_cli.commands.{module}"


app = typer.Typer(
    name="rlboost",
    cls=lazy_group(COMMANDS),
    help="RL post-training of LLMs with rollout on spot GPUs: machines vanish, tokens don't",
    epilog="Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity,"
    " 5 budget reached, 6 credentials or quota, 7 cloud unreachable, 130 interrupted before there was a run",
    no_args_is_help=True,
    **SETTINGS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rlboost {version('rlboost')}")
        raise typer.Exit


def _without_color(wanted: bool) -> None:
    if wanted:
        os.environ["NO_COLOR"] = "1"


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    no_color: Annotated[
        bool,
        typer.Option("--no-color", callback=_without_color, is_eager=True, help="Print without colour"),
    ] = False,
) -> None:
    """Hold the commands together; typer wants a function for that."""


def run() -> None:
    """Run the command that was typed; never returns."""
    app(prog_name="rlboost")


if __name__ == "__main__":
    run()
