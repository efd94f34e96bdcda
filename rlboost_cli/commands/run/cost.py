"""`rlboost cost`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal.completion import RunName


def cost(
    run: RunName,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a CSV table of machines and steps")] = False,
) -> None:
    """Show what a run costs, on what, and what it would have cost on demand

    Example: rlboost cost quickstart --json
    """
    from msgspec import to_builtins

    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens
    from rlboost_runtime.billing.books import report_of
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    if as_json and as_csv:
        raise ConfigError("both --json and --csv were given", "leave one of them out")
    folder = find_run(run)
    look_at(folder, output.progress, ledger=True)
    with output.working("adding up what the run cost"):
        report = report_of(folder)
    if as_json:
        output.as_json(to_builtins(report))
    elif as_csv:
        screens.cost_csv(report)
    else:
        screens.cost(report)
