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
from rlboost_runtime.run.checkpoints import ForkPoint
from rlboost_runtime.run.create import (
    FoundRun,
    differences,
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
    fork: ForkPoint | None = None
    """The checkpoint that a new run is to start from."""

    @property
    def num_steps_left(self) -> int:
        """Steps of the job, without those that a fork has from its checkpoint."""
        return self.job.algorithm.steps - (0 if self.fork is None else self.fork.step)

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
            return prepare_run(self.job_file, self.job, resume=resume, fork=self.fork)
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


_FORK_KEEPS = ("model:", "model.", "algorithm.lora", "trainer.script")
"""Fields, or beginnings of fields, that decide which weights and optimizer state there are."""


def _fork_target(argument: str, job_file: Path, start: str) -> Target:
    """Return the new run of a job file from a checkpoint, RUN@STEP. Raises `ConfigError` where the job cannot
    go on from it, and what `ForkPoint.find` raises."""
    if not _is_file(job_file, argument):
        raise ConfigError(
            f"--from starts a new run, but {argument} is no job file",
            "give a job file, such as a copy of the run's job.yaml with other fields",
        )
    job, fork = _load(job_file), ForkPoint.find(start)
    parent = stored_job(fork.parent)
    different = [each for each in differences(parent, job) if each.startswith(_FORK_KEEPS)]
    decays = parent.algorithm.weight_decay, job.algorithm.weight_decay
    if (decays[0] == 0) != (decays[1] == 0):  # the optimizer's groups of parameters are others
        different.append(f"algorithm.weight_decay: {decays[0]:g} there, {decays[1]:g} here, and one is 0")
    if different:
        raise ConfigError(
            f"{job_file}: the checkpoint {fork} is of another model or optimizer: {'; '.join(different)}",
            "undo these changes, or leave --from out; other fields may differ",
        )
    if parent.trainer.script is not None or job.trainer.is_elsewhere:
        why = "its trainer keeps checkpoints of its own" if parent.trainer.script else "its head is elsewhere"
        raise ConfigError(
            f"{job_file}: --from is not possible here: {why}", "leave --from out (docs/limits.md)"
        )
    if job.algorithm.steps <= fork.step:
        raise ConfigError(
            f"{job_file}: algorithm.steps is {job.algorithm.steps}, and {fork} has {fork.step} steps already",
            "algorithm.steps counts from the start of the parent: raise it",
        )
    return Target(job, job_file, None, fork=fork)


def find_target(
    argument: str,
    *,
    resume: bool,
    start: str | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Target:
    """Return what `argument` means: an ended run is resumed with its job file as that is now, if it is there
    still. `start`: the checkpoint, RUN@STEP, from which the job file's new run goes on. Raises `NothingLeft`,
    `ConfigError` (bad job file, ended run) and `NotFound`."""
    path = Path(argument)
    if start is not None and resume:
        raise ConfigError("--from and --resume were given", "--from starts a new run, --resume continues one")
    if start is not None:
        return _fork_target(argument, path, start)
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


def is_place(argument: str) -> bool:
    """Return True if that names a place with a run's copies, not a job file or a run."""
    return "://" in argument or (os.path.isabs(argument) and os.path.isdir(argument))


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
