"""Commands that start a run or continue it, `up`, `launch`, `serve`, and that use its fleet: `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import RunName

if TYPE_CHECKING:
    from rlboost_runtime.run.folder import RunFolder


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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
) -> None:
    """Start a run without its trainer

    Example: rlboost up job.yaml
    """
    from rlboost_cli.planning.launching import prepared
    from rlboost_cli.runs.supervision import bring_up
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens

    run = prepared(job, "up?", resume=False, yes=yes)
    try:
        with output.working() as say:
            bring_up(run, say)
    except KeyboardInterrupt:
        screens.left_alone(run)
        raise
    output.show(f"{run.name} is up; rlboost launch {run.name} trains, rlboost down {run.name} ends it")


def launch(
    job_or_run: Annotated[
        str,
        typer.Argument(
            help="A job file, the name of a run, or with --resume OUTPUT/RUN of a lost head",
            metavar="JOB_OR_RUN",
            show_default=False,
            autocompletion=completion.jobs_and_runs,
        ),
    ],
    detach: Annotated[bool, typer.Option("--detach", help="Return once the run has started")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that has ended, from its last checkpoint")
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start a new run of the job file from a checkpoint of another; without @STEP, its newest",
            metavar="RUN@STEP",
            show_default=False,
            autocompletion=completion.runs,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Where machines elsewhere reach this one, if it replaces a lost head",
            metavar="HOST",
            show_default=False,
        ),
    ] = None,
    no_doctor: Annotated[
        bool, typer.Option("--no-doctor", help="Do not check data, reward, engine and secrets first")
    ] = False,
) -> None:
    """Start or continue a run and watch it; Ctrl-C detaches

    Example: rlboost launch job.yaml
    """
    from rlboost_cli.planning.launching import prepared
    from rlboost_cli.runs.target import NothingLeft
    from rlboost_cli.terminal import output

    try:
        run = prepared(
            job_or_run,
            "launch?",
            resume=resume,
            yes=yes,
            checks=not no_doctor,
            start=start,
            address=address,
        )
    except NothingLeft as done:
        output.progress(f"{done.problem}; {done.remedy}")
        _finish(done.run)
        return
    _start(run, detach=detach)


def serve(
    job_or_run: Annotated[
        str,
        typer.Argument(
            help="A job file with endpoint: {trains: false}, or the name of such a run",
            metavar="JOB_OR_RUN",
            show_default=False,
            autocompletion=completion.jobs_and_runs,
        ),
    ],
    detach: Annotated[bool, typer.Option("--detach", help="Return once it answers requests")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Serve a run again that has ended")] = False,
    no_doctor: Annotated[
        bool, typer.Option("--no-doctor", help="Do not check model, engine and secrets first")
    ] = False,
) -> None:
    """Serve a model from spot machines with an on-demand floor; Ctrl-C detaches

    Example: rlboost serve serve.yaml
    """
    from rlboost_cli.planning.launching import prepared, require_served, wait_until_served
    from rlboost_cli.runs.target import find_job
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens

    require_served(job_or_run, find_job(job_or_run)[0])
    run = prepared(job_or_run, "serve?", resume=resume, yes=yes, checks=not no_doctor)

    def tell() -> None:
        with output.working() as say:
            url = wait_until_served(run, say)
        screens.served_at(run, url)

    _start(run, detach=detach, once_up=tell)


def _start(run: RunFolder, *, detach: bool, once_up: Callable[[], None] = lambda: None) -> None:
    """Bring a run up with its trainer and watch it; `once_up` is called in between."""
    from rlboost_cli.runs.supervision import bring_up, want_training
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens
    from rlboost_cli.views.live import follow

    try:
        want_training(run)
        with output.working() as say:
            bring_up(run, say)
        once_up()
        if not detach:
            screens.follow(follow(run))
    except KeyboardInterrupt:
        if not screens.left_alone(run):
            raise
        return
    if detach:
        screens.detached(run)
    else:
        _finish(run)


def generate(
    run: RunName,
    rows: Annotated[
        Path, typer.Argument(help="File with a request's body per line", metavar="IN", show_default=False)
    ],
    answers: Annotated[
        Path, typer.Argument(help="File for an answer per line", metavar="OUT", show_default=False)
    ],
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=1024, help="Requests under way at once")
    ] = 32,
) -> None:
    """Answer a file of requests by a run's fleet, each once

    Type the same again to go on after it was interrupted.

    Example: rlboost generate served in.jsonl out.jsonl
    """
    from rlboost_cli.runs.batch import Batch, read_rows
    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.run.index import find_run

    folder = find_run(run)
    if not folder.api_endpoint.exists():
        raise ConfigError(f"run {run} has no endpoint", "write endpoint: {} into its job file, and launch it")
    asked = read_rows(rows)
    batch = Batch(folder, asked, answers, parallel)
    with output.working() as say:
        num_refused = batch.run(lambda done: say(f"{done} of {len(asked)} rows answered"))
    refused = f", {num_refused} of them with an error" if num_refused else ""
    output.show(f"{len(asked)} rows answered in {answers}{refused}")


def _finish(run: RunFolder) -> None:
    from rlboost_cli.planning.launching import collected
    from rlboost_cli.runs.run_status import run_status
    from rlboost_cli.terminal import output
    from rlboost_cli.views import screens
    from rlboost_runtime.billing.books import report_of

    outcome = collected(run)
    with output.working("computing the cost"):
        report = report_of(run)
    screens.outcome(run, outcome, run_status(run).status, report)
    raise typer.Exit(outcome.exit_code)
