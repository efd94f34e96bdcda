"""`rlboost preempt`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal import completion


def preempt(
    run: Annotated[
        str,
        typer.Argument(
            help="The run", metavar="RUN", show_default=False, autocompletion=completion.open_runs
        ),
    ],
    instance: Annotated[
        str,
        typer.Argument(
            help="The instance",
            metavar="INSTANCE",
            show_default=False,
            autocompletion=completion.instances,
        ),
    ],
    notice: Annotated[
        float | None,
        typer.Option("--notice", min=0.0, help="Seconds of warning; without it, at once", show_default=False),
    ] = None,
) -> None:
    """Take one instance away on purpose, as its cloud would

    Example: rlboost preempt quickstart spot-2 --notice 5
    """
    from rlboost_cli.runs import client
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import NotFound
    from rlboost_runtime.run_index import find_run, is_open

    folder = find_run(run)
    if not is_open(folder):
        raise NotFound(
            f"run {run} has ended and has no instance {instance}", "rlboost status lists open runs"
        )
    client.preempt(folder, instance, notice)
    output.show(f"{instance} is taken away" + (" now" if notice is None else f" in {notice:g} s"))
