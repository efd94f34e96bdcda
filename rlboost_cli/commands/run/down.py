"""`rlboost down`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal.completion import RunName


def down(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    lost_head: Annotated[
        bool,
        typer.Option("--lost-head", help="Its head is gone for good: end what it launched from here"),
    ] = False,
) -> None:
    """End a run for certain and show what it cost

    Example: rlboost down quickstart
    """
    from rlboost_cli.runs.teardown import end_run, end_without_head
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens
    from rlboost_runtime.billing.books import report_of
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run, is_open

    folder = find_run(run)
    if lost_head and not folder.head.exists():
        raise ConfigError(f"the head of {run} is this machine", "leave --lost-head out")
    question = f"end {run}? its checkpoints stay" if not lost_head else f"end {run} without its head?"
    if is_open(folder) and not yes and output.is_terminal() and not output.confirm(question):
        raise typer.Exit(0)
    with output.working() as say:
        ended = end_without_head(folder, say) if lost_head else end_run(folder, say)
        say(f"adding up what {run} cost")
        report = report_of(folder)
    screens.ending(folder, ended)
    screens.cost(report)
