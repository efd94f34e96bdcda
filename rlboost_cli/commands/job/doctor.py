"""`rlboost doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost_cli.terminal import completion

if TYPE_CHECKING:
    from rlboost_runtime.job import Job


def doctor(
    job_or_run: Annotated[
        str | None,
        typer.Argument(
            help="A job file, or the name of a run, to look at too",
            metavar="[JOB_OR_RUN]",
            show_default=False,
            autocompletion=completion.jobs_and_runs,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Look whether this machine, the job and its head elsewhere are ready to run

    Example: rlboost doctor job.yaml
    """
    from rlboost_cli.doctor.checks import examine
    from rlboost_cli.doctor.findings import Diagnosis, DoctorContext, Verdict, lines_of
    from rlboost_cli.terminal import output
    from rlboost_runtime.run.folder import home

    job, job_file = (None, None) if job_or_run is None else _named(job_or_run)
    patient, diagnosis = DoctorContext(home(), job, job_file), Diagnosis()
    for finding in examine(patient, lambda words: output.progress(f"... {words}")):
        diagnosis.findings.append(finding)
        if not as_json:
            output.show("\n".join(lines_of(finding)))
    if as_json:
        output.as_json(diagnosis.as_json(patient))
    else:
        failures, warnings = diagnosis.count(Verdict.FAIL), diagnosis.count(Verdict.WARN)
        output.progress(f"\n{failures} failed, {warnings} warnings")
    raise typer.Exit(diagnosis.exit_code)


def _named(job_or_run: str) -> tuple[Job, Path]:
    """Return a job and its file, whose folder has the files that it names."""
    from rlboost_cli.runs.target import find_job

    return find_job(job_or_run)
