"""From what was typed, a job file or a run's name, to a job and a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlboost_cli.runs.refresh import look_at
from rlboost_cli.terminal.errors import require_room
from rlboost_runtime.errors import ConfigError, NotFound
from rlboost_runtime.job import Job
from rlboost_runtime.run.create import (
    FoundRun,
    name_of_run,
    newest_run,
    prepare_run,
    reopen,
    resume_run,
    source_of,
    stored_job,
)
from rlboost_runtime.run.folder import RunFolder, home, read_json
from rlboost_runtime.run.index import find_run, is_open


@dataclass(frozen=True, slots=True)
class Target:
    """What to launch; nothing is created yet."""

    job: Job
    job_file: Path | None
    """The one that was given, or that the named run is resumed from; None where the run's copy is used."""
    run: RunFolder | None
    """The named run; None where a job file was given."""
    resume: bool = False

    @property
    def name(self) -> str:
        """What the run is called, or would be."""
        return name_of_run(self.job.name, resume=self.resume) if self.run is None else self.run.name

    @property
    def is_to_start(self) -> bool:
        """True unless an open run goes on, with the files that it has: its processes may run already."""
        known = self.run or newest_run(self.job.name)
        return known is None or not is_open(known)

    @property
    def folder(self) -> Path:
        """Where the files are that the job names."""
        if self.job_file is not None:
            return self.job_file.parent
        assert self.run is not None
        return self.run.files

    def prepare(self, *, resume: bool, say: Callable[[str], None] = lambda words: None) -> FoundRun:
        """Return the run, made or opened again where that is needed; a run whose head is elsewhere is looked
        at first.

        Raises `ConfigError`, `NotFound`, and `RuntimeFault` where the disk has no room for a run.
        """
        if self.run is None and (newest := newest_run(self.job.name)) is not None:
            look_at(newest, say)
        if resume and (known := self.run or newest_run(self.job.name)) and known.head_machines.exists():
            from rlboost_cli.head.renting import require_head

            require_head(known)
        if self.run is None or not is_open(self.run):
            require_room(home() / "runs")
        if self.run is None:
            assert self.job_file is not None
            return prepare_run(self.job_file, self.job, resume=resume)
        if resume and self.job_file is not None:
            return resume_run(self.run, self.job_file, self.job)
        if resume:
            reopen(self.run)
        return FoundRun(self.run, self.job, is_new=False)


class NothingLeft(ConfigError):
    """A run that is done was named, and all of its steps are trained: it would rent machines for nothing."""

    def __init__(self, run: RunFolder, num_steps: int) -> None:
        super().__init__(
            f"{run.name} is done: all of its {num_steps} steps are trained",
            "raise algorithm.steps in its job file and add --resume to continue; another name there starts a"
            " new run",
        )
        self.run = run


def find_target(argument: str, *, resume: bool, say: Callable[[str], None] = lambda words: None) -> Target:
    """Return what `argument` means: an ended run is resumed with its job file as that is now, if it is there
    still. Raises `NothingLeft`, `ConfigError` (bad job file, ended run) and `NotFound`."""
    path = Path(argument)
    if _is_file(path, argument):
        job = _load(path)
        if resume and (newest := newest_run(job.name)) is not None:
            look_at(newest, say)
            _require_steps_left(newest, job)
        return Target(job, path, None, resume)
    run = _find_run(argument)
    look_at(run, say)
    if not is_open(run) and not resume:
        _require_steps_left(run, stored_job(run))
        state = (read_json(run.outcome) or {}).get("state", "ended")
        raise ConfigError(
            f"run {run.name} has ended: {state}",
            f"rlboost launch {run.name} --resume continues it; a job file starts a new run",
        )
    source = None if is_open(run) else source_of(run)
    job = stored_job(run) if source is None else _load(source)
    _require_steps_left(run, job)
    return Target(job, source, run)


def _require_steps_left(run: RunFolder, job: Job) -> None:
    """Raise `NothingLeft` where the run has trained all steps that `job` wants."""
    trained = (read_json(run.status) or {}).get("step")
    is_done = (read_json(run.outcome) or {}).get("state") == "done"
    if is_done and isinstance(trained, int) and trained >= job.algorithm.steps:
        raise NothingLeft(run, trained)


def find_job(argument: str) -> tuple[Job, Path]:
    """Return the job that `argument` means, a file or a run, and its file: beside it is what it names. Raises
    `ConfigError` and `NotFound`."""
    path = Path(argument)
    if _is_file(path, argument):
        return _load(path), path
    run = _find_run(argument)
    return stored_job(run), run.files / run.job_json.name


def _is_file(path: Path, argument: str) -> bool:
    return os.path.isfile(path) or path.suffix in (".yaml", ".yml") or "/" in argument


def _find_run(argument: str) -> RunFolder:
    try:
        return find_run(argument)
    except NotFound as error:
        raise NotFound(
            error.problem, f"give a job file, such as job.yaml, or a run ({error.remedy})"
        ) from None


def _load(job_file: Path) -> Job:
    from rlboost_runtime.job.file.load import load_job

    return load_job(job_file)
