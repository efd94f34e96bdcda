"""The `rlboost` program: which commands there are. Importing this loads nothing heavy, and no command.

Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity, 5 budget
reached, 6 credentials or quota, 7 cloud unreachable, 130 interrupted before there was a run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal.lazy_group import SETTINGS, lazy_group

# NAME is function NAME in commands/NAME.py; the words are the first line of its docstring (a test compares)
COMMANDS = {
    "init": "Write a commented job file to start from",
    "check": "Validate a job file and print the resolved job",
    "doctor": "Look whether this machine, the job and its head elsewhere are ready to run",
    "plan": "Predict step time and cost from what this machine measured",
    "up": "Start everything of a run but its trainer",
    "launch": "Start or continue a run and watch it; Ctrl-C detaches",
    "status": "Show all runs, or how one of them is doing",
    "logs": "Show a run's logs, also of machines that are gone",
    "samples": "Show what the policy said: a step's best, worst and middling response",
    "cost": "Show what a run costs, on what, and what it would have cost on demand",
    "preempt": "Take one instance away on purpose, as its cloud would",
    "down": "End a run for certain and show what it cost",
    "gc": "Find and end machines that no open run owns",
    "prices": "Show what GPU machines cost, spot and on demand, cheapest first",
    "simulate": "Replay a spot market under a virtual clock and compare policies",
    "traces": "List, show or fetch recorded spot markets to simulate on",
}

app = typer.Typer(
    name="rlboost",
    cls=lazy_group(COMMANDS),
    help="RL post-training of LLMs with rollout on spot GPUs: machines vanish, tokens don't",
    epilog="Exit codes: 0 done or detached, 1 failed, 2 bad input, 3 no such run or instance, 4 no capacity,"
    " 5 budget reached, 6 credentials or quota, 7 cloud unreachable, 130 interrupted before there was a run",
    no_args_is_help=True,
    **SETTINGS,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"rlboost {version('rlboost')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Hold the commands together; typer wants a function for that."""


def run() -> None:
    """Run the command that was typed; never returns."""
    app(prog_name="rlboost")


if __name__ == "__main__":
    run()
