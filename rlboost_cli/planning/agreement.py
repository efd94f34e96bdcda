"""Showing what may cost money, and asking, before anything is bought.

A short run of a job, made only to be measured: the basis of a plan where no former run is like the job.

It is an ordinary run, called JOB-probe, with a few steps; its figures stay in the home like any other run's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlboost_cli.head.control import collect_results
from rlboost_cli.planning.plan import LaunchPlan, describe_plan, launch_plan
from rlboost_cli.runs.supervision import bring_up, want_training
from rlboost_cli.simulation.rates import FIRST_STEPS_LEFT_OUT, MIN_STEPS
from rlboost_cli.terminal import output
from rlboost_cli.views.live import NewLines, follow, outcome_of
from rlboost_cli.views.screens import left_alone
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import prepare_run
from rlboost_runtime.run.folder import RunFolder


def planned(run: str, job: Job, folder: Path, *, with_options: bool = False) -> LaunchPlan:
    """Return the plan of `job`, whose files are in `folder`, as run `run`, with a sign of life: simulating
    takes seconds, and SkyPilot may have to start. A job that cannot be simulated has a plan all the same."""
    from rlboost_cli.planning.projection import project
    from rlboost_cli.planning.serving import project_serving

    forecast, serving, problem = None, None, ""
    with output.working("looking up prices") as say:
        try:
            if job.only_serves:
                say("simulating the job")
                serving = project_serving(job, folder)
            else:
                forecast = project(job, folder, say, with_options=with_options)
        except RLBoostError as error:
            problem = str(error)
        say("looking up prices")
        return launch_plan(run, job, forecast, problem, serving)


def agree(plan: LaunchPlan, question: str | None, *, yes: bool) -> None:
    """Show the plan and ask the question where it is charged; returns where the answer is yes.

    `yes`: it was given with the command. `question`: None for a program, which is asked nothing. Raises like
    `output.require_consent`.
    """
    for line in describe_plan(plan):
        output.progress(line)
    if yes or not plan.is_charged:
        return
    output.require_consent(question, "the plan")


PROBE_STEPS = MIN_STEPS + FIRST_STEPS_LEFT_OUT + 1
"""One more than the least that makes a basis: a restart may cost a step."""
SUFFIX = "-probe"


def probe(job_file: Path, job: Job, progress: Callable[[str], None]) -> RunFolder:
    """Run `job` for a few steps and return the ended run; a line of progress per step and event. Raises
    `RuntimeFault` where it fails."""
    name = job.name[: 63 - len(SUFFIX)] + SUFFIX
    short = job.model_copy(
        update={"name": name, "algorithm": job.algorithm.model_copy(update={"steps": PROBE_STEPS})}
    )
    run = prepare_run(job_file, short).run
    progress(f"probe: {PROBE_STEPS} steps of this job as run {run.name}")
    want_training(run)
    try:
        bring_up(run, progress)
        lines = NewLines()
        for status in follow(run):
            for line in lines.of(status):
                progress(f"  {line}")
    except KeyboardInterrupt:
        left_alone(run)
        raise
    ended = outcome_of(run)
    if run.head.exists():
        collect_results(run, progress)
    if ended.state != "done":
        raise RuntimeFault(
            f"the probe {run.name} {ended.state}: {ended.problem or 'no reason given'}",
            ended.remedy or f"rlboost logs {run.name} shows what happened",
        )
    return run
