"""Commands about a job file: `init`, `tasks`, `check`, `schema`, `doctor` and `plan`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlboost_cli.terminal import completion
from rlboost_cli.terminal.completion import AsJson, JobFile


def _templates(incomplete: str) -> list[tuple[str, str]]:
    """Return what the shell offers for --template."""
    from rlboost_cli.runs.new_job import template_rows

    return [row for row in template_rows() if row[0].startswith(incomplete)]


def init(
    path: Annotated[Path, typer.Argument(help="The file to write, or a folder for it")] = Path("job.yaml"),
    template: Annotated[
        str | None,
        typer.Option("--template", help="The template; --list shows them all", autocompletion=_templates),
    ] = None,
    foreign: Annotated[
        Path | None,
        typer.Option("--from", help="Translate a configuration of veRL, TRL, prime-rl or OpenRLHF"),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="GPUs that TRL trained on, for --from")
    ] = None,
    list_templates: Annotated[
        bool, typer.Option("--list", help="List the templates and write nothing")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file")] = False,
) -> None:
    """Write a commented job file to start from

    Example: rlboost init job.yaml --template laptop

    Example: rlboost init job.yaml --from run_grpo.sh
    """
    from rlboost_cli.foreign import job_text
    from rlboost_cli.runs import new_job
    from rlboost_cli.terminal import output, text

    if list_templates:
        rows = new_job.template_rows()
        if sys.stdout.isatty():
            rows = text.wrapped(rows, shutil.get_terminal_size().columns)
        output.show(text.table(("template", "description"), rows))
        return
    if foreign is None:
        template = template or "laptop"
        written = new_job.write_job(path, new_job.template_text(template), force=force)
        said = new_job.closing_words(written, template)
    else:
        new_job.template_text(template := template or job_text.TEMPLATE)
        content, not_taken = job_text.translated_job(foreign, template, devices)
        written = new_job.write_job(path, content, force=force)
        said = [
            *job_text.summary(not_taken),
            f"machines and budget are those of template {template}; --template NAME takes others, and"
            " rlboost init --list names them",
            *new_job.closing_words(written, template),
        ]
    for line in said:
        output.progress(line)


def tasks(
    taskset: Annotated[str, typer.Argument(help="Id of a taskset of verifiers")],
    number: Annotated[int, typer.Option("--number", min=1, help="The first so many tasks")] = 1000,
    config: Annotated[str, typer.Option("--config", help="Fields of its configuration, as JSON")] = "{}",
    python: Annotated[
        str | None, typer.Option("--python", help="A Python that has verifiers; else one is made with uv")
    ] = None,
    package: Annotated[
        list[str] | None, typer.Option("--package", help="What to install beside verifiers; may repeat")
    ] = None,
    files: Annotated[Path, typer.Option("--files", help="Folder that holds its module, if any")] = Path("."),
) -> None:
    """Print the tasks of a taskset of verifiers as rows of a data file

    Example: rlboost tasks gsm8k-v1 --package gsm8k-v1 --number 500 > tasks.jsonl
    """
    import json

    from rlboost_cli.terminal import output
    from rlboost_runtime.errors import ConfigError
    from rlboost_runtime.job.environment import VerifiersTaskset
    from rlboost_runtime.trainer.episodes.taskset import task_rows, verifiers_python

    try:
        fields = json.loads(config)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"--config: {config!r} is no JSON object", 'write it like \'{"split": "train"}\'')
    settings = VerifiersTaskset(taskset=taskset, config=fields, python=python, packages=package or [])
    found = verifiers_python(settings, output.progress)
    output.progress(f"loading {taskset}")
    for line in task_rows(settings, files, number, found):
        output.show(line)


def check(job: JobFile, as_json: AsJson = False) -> None:
    """Validate a job file and print the resolved job

    Example: rlboost check job.yaml
    """
    import json

    from rlboost_cli.terminal import output
    from rlboost_runtime.job.file.load import hints, load_job

    loaded = load_job(job)
    resolved = json.loads(loaded.canonical_json())
    for hint in hints(loaded):
        output.progress(f"note: {hint}")
    if as_json:
        output.as_json(resolved)
    else:
        output.as_yaml(resolved)


def schema() -> None:
    """Print the JSON Schema of job files, for editors

    Example: rlboost schema > job.schema.json
    """
    from rlboost_cli.terminal import output
    from rlboost_runtime.job.file.schema import job_schema

    output.as_json(job_schema())


def doctor(
    job_or_run: Annotated[
        str | None,
        typer.Argument(
            help="A job file or a run to check as well",
            metavar="JOB_OR_RUN",
            show_default=False,
            autocompletion=completion.jobs_and_runs,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine, the job and its remote head

    Example: rlboost doctor job.yaml
    """
    from rlboost_cli.doctor.checks import examine
    from rlboost_cli.doctor.findings import Diagnosis, DoctorContext, Verdict, lines_of
    from rlboost_cli.runs.target import find_job
    from rlboost_cli.terminal import output, text
    from rlboost_runtime.run.folder import home

    job, job_file = (None, None) if job_or_run is None else find_job(job_or_run)
    patient, diagnosis = DoctorContext(home(), job, job_file), Diagnosis()
    for finding in examine(patient, lambda words: output.progress(f"... {words}")):
        diagnosis.findings.append(finding)
        if not as_json:
            output.show("\n".join(lines_of(finding, output.width())))
    if as_json:
        output.as_json(diagnosis.as_json(patient))
    else:
        failures, warnings = diagnosis.count(Verdict.FAIL), diagnosis.count(Verdict.WARN)
        output.progress(f"\n{failures} failed, {text.counted(warnings, 'warning')}")
    raise typer.Exit(diagnosis.exit_code)


def plan(
    job: JobFile,
    probe: Annotated[
        bool, typer.Option("--probe", help="Run a few steps of the job first, to calibrate the simulation")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation before --probe")] = False,
    as_json: AsJson = False,
) -> None:
    """Forecast a job's time and cost, and compare alternatives

    Example: rlboost plan job.yaml
    """
    from rlboost_cli.planning.agreement import agree, planned
    from rlboost_cli.planning.plan import describe_plan, plan_json
    from rlboost_cli.terminal import output
    from rlboost_runtime.job.file.load import load_job
    from rlboost_runtime.job.file.places import place_hints
    from rlboost_runtime.run.create import name_of_run

    loaded = load_job(job)
    name = name_of_run(loaded.name)
    for hint in place_hints(loaded):
        output.progress(f"note: {hint}")
    if probe:
        from rlboost_cli.planning.agreement import probe as measure

        agree(planned(name, loaded, job.parent), "run a few steps of it?", yes=yes)
        measure(job, loaded, output.progress)
    made = planned(name, loaded, job.parent, with_options=True)
    if as_json:
        output.as_json(plan_json(made))
    else:
        output.show("\n".join(describe_plan(made)))
    if made.forecast is not None and not made.forecast.is_calibrated:
        cost = ", which costs money" if made.is_charged else ""
        output.progress(f"\nhint: rlboost plan {job} --probe measures a few steps and calibrates it{cost}")
