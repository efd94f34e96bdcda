"""`rlboost launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlboost_cli.plan import LaunchPlan
    from rlboost_runtime.run_folder import RunFolder


def launch(
    job_or_run: Annotated[
        str, typer.Argument(help="A job file, or the name of a run", metavar="JOB_OR_RUN", show_default=False)
    ],
    detach: Annotated[bool, typer.Option("--detach", help="Return once the run is under way")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before spending")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that has ended, from its last checkpoint")
    ] = False,
) -> None:
    """Start or continue a run and watch it; Ctrl-C detaches

    Example: rlboost launch job.yaml
    """
    from rlboost_cli import output
    from rlboost_cli.plan import describe_plan, launch_plan
    from rlboost_cli.supervision import bring_up, want_training
    from rlboost_cli.target import find_target

    target = find_target(job_or_run, resume=resume)
    plan = launch_plan(target.job.name if target.run is None else target.run.name, target.job)
    for line in describe_plan(plan):
        output.progress(line)
    _ask(plan, yes=yes)
    found = target.prepare(resume=resume)
    output.found_run(found)
    try:
        want_training(found.run)
        bring_up(found.run, output.progress)
        if not detach:
            _watch(found.run)
    except KeyboardInterrupt:
        detach = True
    if detach:
        output.detached(found.run)
    else:
        _finish(found.run)


def _ask(plan: LaunchPlan, *, yes: bool) -> None:
    from rlboost_cli import output
    from rlboost_runtime.errors import ConfigError

    if yes or not plan.is_charged:
        return
    if not output.is_terminal():
        raise ConfigError(
            "this run costs money and nobody is here to be asked", "add --yes to agree to the plan"
        )
    if not output.confirm("launch?"):
        raise typer.Exit(0)


def _watch(run: RunFolder) -> None:
    from rlboost_cli import output
    from rlboost_cli.attach import NewLines, follow

    output.follow(follow(run), NewLines().of)


def _finish(run: RunFolder) -> None:
    from rlboost_cli import output
    from rlboost_cli.attach import outcome_of
    from rlboost_cli.costs import report_of

    outcome = outcome_of(run)
    output.show("")
    output.cost(report_of(run))
    output.outcome(run, outcome)
    raise typer.Exit(outcome.exit_code)
