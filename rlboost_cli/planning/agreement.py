"""Showing what may cost money, and asking, before anything is bought."""

from __future__ import annotations

import typer

from rlboost_cli.planning.plan import LaunchPlan, describe_plan, launch_plan
from rlboost_cli.terminal import output
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job


def planned(run: str, job: Job) -> LaunchPlan:
    """Return the plan of `job` under the name `run`, with a sign of life: SkyPilot may have to start for
    that."""
    with output.working("looking at what the machines cost"):
        return launch_plan(run, job)


def agree(plan: LaunchPlan, question: str, *, yes: bool) -> None:
    """Show the plan and ask the question where it is charged; returns where the answer is yes.

    `yes`: it was given with the command. Raises `ConfigError` where nobody can be asked, `typer.Exit` on no.
    """
    for line in describe_plan(plan):
        output.progress(line)
    if yes or not plan.is_charged:
        return
    if not output.is_terminal():
        raise ConfigError(
            "this run costs money and nobody is here to be asked", "add --yes to agree to the plan"
        )
    if not output.confirm(question):
        raise typer.Exit(0)
