"""`rlboost preempt`."""

from __future__ import annotations

from typing import Annotated, Any

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
        str | None,
        typer.Argument(
            help="The instance; by default the spot instance with the most responses in flight",
            metavar="INSTANCE",
            show_default=False,
            autocompletion=completion.instances,
        ),
    ] = None,
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
            f"run {run} has ended and has no instance {instance or 'any more'}",
            "rlboost status lists open runs",
        )
    taken = instance or _busiest(run, client.get_status(folder))
    client.preempt(folder, taken, notice)
    output.show(f"{taken} is taken away" + (" now" if notice is None else f" in {notice:g} s"))


def _busiest(run: str, status: dict[str, Any]) -> str:
    """Return the machine of the spot instance that holds the most responses. Raises `NotFound`."""
    from rlboost_runtime.errors import NotFound

    spot = [i for i in status["instances"] if i["pool"] == "spot" and i["state"] != "gone"]
    if not spot:
        raise NotFound(
            f"run {run} has no spot instance now", "wait for one; rlboost status shows the instances"
        )
    return str(max(spot, key=lambda i: int(i["in_flight"] or 0))["machine"])
