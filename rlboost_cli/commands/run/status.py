"""`rlboost status`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal import completion


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            help="The run; without it, all runs",
            metavar="[RUN]",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Show all runs, or how one of them is doing

    Example: rlboost status quickstart --watch
    """
    from rlboost_cli.runs.refresh import look_at_open
    from rlboost_cli.runs.run_status import run_status, runs_table, status_json
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    if watch and (run is None or as_json):
        raise ConfigError("--watch follows one run on the screen", "name the run, and leave --json out")
    if run is None:
        with output.working("asking the heads of open runs"):
            look_at_open(output.progress)
        rows = runs_table()
        if as_json:
            output.as_json({"runs": rows})
        else:
            screens.runs(rows)
        return
    folder = find_run(run)
    if watch:
        from rlboost_cli.views.live import follow

        try:
            screens.follow(follow(folder))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        return
    found = run_status(folder)
    if as_json:
        screens.staleness(found)
        output.as_json(status_json(folder, found))
    else:
        screens.status(found)
