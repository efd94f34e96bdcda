"""`rlboost samples`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal.completion import RunName


def samples(
    run: RunName,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=1, help="The step, from 1 on; without it the last one", show_default=False
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Show what the policy said: a step's best, worst and middling response

    Example: rlboost samples quickstart --step 10
    """
    from rlboost_cli.runs.files import sample_lines, samples_of
    from rlboost_cli.runs.refresh import look_at
    from rlboost_cli.terminal import output
    from rlboost_runtime.run.index import find_run

    folder = find_run(run)
    look_at(folder, output.progress, logs=True)
    found = samples_of(folder, step)
    if json:
        output.as_json(found)
    else:
        output.show("\n".join(sample_lines(found)))
