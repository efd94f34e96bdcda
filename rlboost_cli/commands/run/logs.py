"""`rlboost logs`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import RunName


def logs(
    run: RunName,
    instance: Annotated[
        str | None,
        typer.Argument(
            help="An instance, a machine or one of our processes, such as coordinator",
            metavar="[INSTANCE]",
            show_default=False,
            autocompletion=completion.logs,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Read on until the run ends")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Last lines of each file; 0 for all")
    ] = 100,
) -> None:
    """Show a run's logs, also of machines that are gone

    Example: rlboost logs quickstart coordinator -f
    """
    import time

    from rlboost_cli.runs.files import Tail
    from rlboost_cli.runs.refresh import looking_at
    from rlboost_cli.terminal import output
    from rlboost_runtime.run.index import find_run, is_open

    folder = find_run(run)
    tail = Tail(folder, instance, lines)
    try:
        with looking_at(folder, output.progress, logs=True) as look:
            has_any = False
            while True:
                look()
                ended = not is_open(folder)  # before reading: what was written by then is shown
                has_any = output.log_text(tail.read(), folder.logs) or has_any
                if not follow or ended:
                    break
                time.sleep(0.25)
        if not has_any:
            output.progress(f"run {run} has no logs yet")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
