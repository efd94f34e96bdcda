"""`rlboost up`."""

from __future__ import annotations

from typing import Annotated

import typer


def up(
    job: Annotated[
        str,
        typer.Argument(help="The job file, or the name of an open run", metavar="JOB", show_default=False),
    ],
) -> None:
    """Start everything of a run but its trainer

    Example: rlboost up job.yaml
    """
    from rlboost_cli import output
    from rlboost_cli.supervision import bring_up
    from rlboost_cli.target import find_target

    found = find_target(job, resume=False).prepare(resume=False)
    output.found_run(found)
    bring_up(found.run, output.progress)
    name = found.run.name
    output.show(f"{name} is up; rlboost launch {name} trains, rlboost down {name} ends it")
