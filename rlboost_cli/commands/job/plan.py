"""`rlboost plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    job: Annotated[Path, typer.Argument(help="The job file", metavar="JOB", show_default=False)],
    probe: Annotated[
        bool, typer.Option("--probe", help="Run a few steps of the job first, to measure it")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --probe spends")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Predict step time and cost from what this machine measured

    Example: rlboost plan job.yaml
    """
    from rlboost_cli.planning.agreement import agree, planned
    from rlboost_cli.planning.plan import describe_plan, plan_json
    from rlboost_cli.terminal import output
    from rlboost_runtime.job.file.load import load_job

    loaded = load_job(job)
    if probe:
        from rlboost_cli.planning.agreement import probe as measure

        agree(planned(loaded.name, loaded), "run a few steps of it?", yes=yes)
        measure(job, loaded, output.progress)
    made = planned(loaded.name, loaded)
    if as_json:
        output.as_json(plan_json(made))
    else:
        output.show("\n".join(describe_plan(made)))
    if made.forecast is None:
        cost = ", which costs money" if made.is_charged else ""
        output.progress(f"\nhint: rlboost plan {job} --probe runs a few steps of it and measures{cost}")
