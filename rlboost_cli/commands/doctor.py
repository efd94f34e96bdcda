"""`rlboost doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    job: Annotated[
        Path | None, typer.Argument(help="A job file to look at too", metavar="[JOB]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
    """Look whether this machine, and the job, are ready to run

    Example: rlboost doctor job.yaml
    """
    from rlboost_cli.doctor.checks import examine
    from rlboost_cli.doctor.findings import Diagnosis, Patient, Verdict, lines_of
    from rlboost_cli.terminal import output
    from rlboost_runtime.run_folder import home

    loaded = None
    if job is not None:
        from rlboost_runtime.job_file import load_job

        loaded = load_job(job)
    patient, diagnosis = Patient(home(), loaded, job), Diagnosis()
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
