"""`rlboost up`."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost_cli.terminal import completion


def up(
    job: Annotated[
        str,
        typer.Argument(
            help="The job file, or the name of an open run",
            metavar="JOB",
            show_default=False,
            autocompletion=completion.jobs_and_runs,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before spending")] = False,
) -> None:
    """Start everything of a run but its trainer

    Example: rlboost up job.yaml
    """
    from rlboost_cli.planning.agreement import agree, planned
    from rlboost_cli.runs.supervision import bring_up
    from rlboost_cli.runs.target import find_target
    from rlboost_cli.terminal import extras, output
    from rlboost_cli.views import screens

    target = find_target(job, resume=False, say=output.progress)
    extras.require(target.job)
    agree(planned(target.name, target.job), "up?", yes=yes)
    with output.working("copying the job's files"):
        found = target.prepare(resume=False, say=output.progress)
    screens.found_run(found)
    try:
        with output.working() as say:
            bring_up(found.run, say)
    except KeyboardInterrupt:
        screens.left_alone(found.run)
        raise
    name = found.run.name
    output.show(f"{name} is up; rlboost launch {name} trains, rlboost down {name} ends it")
