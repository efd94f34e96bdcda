"""`rlboost preempt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rlboost_cli.terminal import completion

if TYPE_CHECKING:
    from rlboost_runtime.run.folder import RunFolder

_TRIES = 5


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
    from rlboost_runtime.run.index import find_run, is_open

    folder = find_run(run)
    if not is_open(folder):
        raise NotFound(
            f"run {run} has ended and has no instance {instance or 'any more'}",
            "rlboost status lists open runs",
        )
    if folder.head.exists():
        from rlboost_cli.head import control

        output.show(control.preempt(folder, instance, notice))
        return
    if instance is None:
        instance = _preempt_busiest(folder, notice)
    else:
        client.preempt(folder, instance, notice)
    output.show(f"{instance} is taken away" + (" now" if notice is None else f" in {notice:g} s"))


def _preempt_busiest(run: RunFolder, notice_s: float | None) -> str:
    """Take the spot machine that holds the most responses and return it. Raises `NotFound`.

    Machines go by themselves, too: where one is gone by the time it is to be taken, the next one is.
    """
    from rlboost_cli.runs import client
    from rlboost_runtime.errors import NotFound

    for _ in range(_TRIES):
        status = client.get_status(run)
        held: dict[str, int] = {}
        for row in status["machines"]:
            if row["pool"] == "spot" and row["state"] == "running":
                held[row["id"]] = 0
        for row in status["instances"]:
            if row["machine"] in held:
                held[row["machine"]] += int(row["in_flight"] or 0)
        if not held:
            break
        machine = max(held, key=lambda name: held[name])
        try:
            client.preempt(run, machine, notice_s)
        except NotFound:
            continue
        return machine
    raise NotFound(f"run {run.name} has no spot machine now", "wait for one; rlboost status shows them")
