"""Making a run's folder out of a job file, or finding the run that the job file already has.

Guarantees:

- a run's folder appears complete or not at all, also when two commands make it at once;
- the same job under the name of an open run continues that run; another job under it is an error that says
  what differs; the name of an ended run gets the next free number: `name-2`, `name-3`;
- the folder holds copies of the files that the job names, so that the run no longer depends on the originals;
  a run that had ended and is resumed with its job file takes them anew, so that a corrected reward counts;
- what a killed command left half made never counts as a run, and the next command removes it;
- `job.json` carries the run's own name: with `name-2` it is `name-2`.

A run is open until its outcome is written.

Secrets are named in the job and taken from the environment of whoever types; their values lie in the run's
`secrets/environment.json` (mode 600) on the head, so that the run goes on after a restart of the machine.
Neither reaches a spot machine, a log or an argument.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlboost_runtime.errors import DISK_ERRNOS, ConfigError, NotFound, RuntimeFault
from rlboost_runtime.job import Job, data_files, data_sources, reward_files, sources_of
from rlboost_runtime.run.checkpoints import ForkPoint
from rlboost_runtime.run.engine_python import find_engine_python
from rlboost_runtime.run.folder import RunFolder, locked, read_json, write_json
from rlboost_runtime.run.head import address_of_head, keep_place, write_address
from rlboost_runtime.run.index import is_open
from rlboost_runtime.run.resolved import read_resolved, write_resolved
from rlboost_runtime.run.security import create_secrets

_MAX_NAME = 63  # as `job.Name` allows
_WORKSHOP = ".new-"  # beginning of the names of folders in which runs are made
_RESTORING = ".restoring-"  # likewise, of runs that are brought here: that may take long
_MAY_CHANGE = (
    *("budget.", "algorithm.steps:", "reward_timeout_s:", "reward_processes:", "reward_memory_mib:"),
    *("reward_sandbox:", "reward_network:"),
    *("algorithm.micro_batch_responses:", "rollout.engine_args.max_running:", "rollout.vllm_args"),
    *("trainer.keep_checkpoints:", "trainer.checkpoint_every_steps:", "trainer.disk_gb:", "output:"),
    *("trainer.activation_checkpointing:", "trainer.optimizer_offload:", "trainer.micro_batch_tokens:"),
    *("weights.keep_in:",),
    *("env.", "env:", "secrets", "requirements", "notify"),
)
"""Fields that may differ when an ended run is resumed: to spend more, to train longer, to wait longer for a
reward, to need less memory or disk, to keep copies elsewhere, to tell others, and for what rewards need. None
of them changes what was trained so far."""
_TOLD_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run that can be started or is running."""

    run: RunFolder
    job: Job
    is_new: bool
    changed_files: tuple[str, ...] = ()
    """Files of the user that have changed since the run took its copies; the copies are used."""
    renewed_files: tuple[str, ...] = ()
    """Files of the user that had changed and that a resumed run has copied again."""


def prepare_run(job_file: Path, job: Job, *, resume: bool = False, fork: ForkPoint | None = None) -> FoundRun:
    """Return the run of `job`, which was read from `job_file`; make it where there is none to continue.

    With `resume` the newest run of the job's name is continued even though it has ended. With `fork` a new
    run is made, which goes on from that checkpoint. Raises `ConfigError` where the open run (or the one to
    resume) has another job, a fork would need its name, or a file that the job names cannot be copied, and
    `NotFound` where there is nothing to resume.
    """
    while True:
        existing = list(_runs_named(job.name))
        newest = existing[-1] if existing else None
        if resume:
            if newest is None:
                raise NotFound(f"no run {job.name} to resume", "leave --resume out to start one")
            return resume_run(newest, job_file, job)
        if newest is not None and is_open(newest):
            if fork is not None:
                raise ConfigError(
                    f"{job_file}: run {newest.name} is open, and a fork is a new run",
                    f"give {job_file.name} another name, or end the run: rlboost down {newest.name}",
                )
            return _continue(newest, job_file, job, resume=False)
        run = _create(RunFolder.named(name_of_run(job.name)), job_file, job, fork)
        if run is not None:
            return FoundRun(run, read_resolved(run.job_json), is_new=True)


def resume_run(run: RunFolder, job_file: Path, job: Job) -> FoundRun:
    """Return the ended `run`, open again, with `job` as `job_file` has it now.

    Raises `ConfigError` where that is another job.
    """
    found = _continue(run, job_file, job, resume=True)
    reopen(run)
    return found


def newest_run(name: str) -> RunFolder | None:
    """Return the newest run of a job called `name`; None where there is none."""
    return next(iter([*_runs_named(name)][::-1]), None)


def name_of_run(name: str, *, resume: bool = False) -> str:
    """Return the name of the run that a job called `name` continues, or that is made for it."""
    existing = list(_runs_named(name))
    if existing and (resume or is_open(existing[-1])):
        return existing[-1].name
    return _numbered(name, len(existing) + 1) if existing else name


def source_of(run: RunFolder) -> Path | None:
    """Return the job file that the run was made from, or None where it is no more."""
    try:
        source = Path(run.job_source.read_text().strip())
    except OSError:
        return None
    return source if source.is_file() else None


def stored_job(run: RunFolder) -> Job:
    """Return the run's resolved job. Raises `RuntimeFault` where this program cannot read it."""
    try:
        return read_resolved(run.job_json)
    except (ValueError, OSError) as exc:
        raise RuntimeFault(
            f"{run.job_json} cannot be read: {str(exc).splitlines()[0]}",
            "use the RLBoost version that the run was started with",
        ) from exc


def reopen(run: RunFolder) -> None:
    """Make an ended run open again: its last outcome is kept as `outcome.previous.json`.

    Nobody is left who knows its ports, so that it takes free ones: another program may have the old ones.
    """
    _restore_files(run)
    if run.outcome.exists():
        _keep_environment(run, stored_job(run))
        for endpoint in (run.endpoint, run.weights_endpoint):
            endpoint.unlink(missing_ok=True)
        run.safe.unlink(missing_ok=True)
        run.ending.unlink(missing_ok=True)  # first: an open run that has it would only be wound up
        os.replace(run.outcome, run.former_outcome)


def files_of(job: Job) -> list[str]:
    """Return the files that the job names, as it names them, relative to the job file; each once."""
    names = list(job.files)
    names += data_files([*data_sources(job.data), *sources_of(job.evaluations)])
    names += reward_files(job.rewards)
    if job.episodes is not None and job.episodes.file is not None:
        names.append(job.episodes.file)
    if job.trainer.script is not None:
        names.append(job.trainer.script)
    names += [
        o.market.trace for o in job.rollout.spot.local_offers if o.market is not None and o.market.trace
    ]
    return list(dict.fromkeys(names))


def copy_files(job: Job, source: Path, target: Path) -> None:
    """Copy the files that the job names from below `source` to below `target`. Raises `ConfigError`."""
    for name in files_of(job):
        _copy(source, name, target)


def differences(old: Job, new: Job) -> list[str]:
    """Return what differs, one `field: old there, new here` per field; empty where the jobs are the same."""
    before = dict(flat_fields(json.loads(old.canonical_json())))
    after = dict(flat_fields(json.loads(new.canonical_json())))
    fields = dict.fromkeys([*before, *after])
    return [
        f"{field}: {_shown(before, field)} there, {_shown(after, field)} here"
        for field in fields
        if before.get(field, ...) != after.get(field, ...)
    ]


# --- finding -----------------------------------------------------------------------------------------------


def _runs_named(name: str) -> Iterator[RunFolder]:
    number = 1
    while (run := RunFolder.named(name if number == 1 else _numbered(name, number))).job_json.exists():
        yield run
        number += 1


def _numbered(name: str, number: int) -> str:
    suffix = f"-{number}"
    return name[: _MAX_NAME - len(suffix)] + suffix


def _continue(run: RunFolder, job_file: Path, job: Job, *, resume: bool) -> FoundRun:
    _restore_files(run)
    stored = stored_job(run)
    wanted = job.model_copy(update={"name": run.name})
    different = differences(stored, wanted)
    if different and resume and not is_open(run) and all(d.startswith(_MAY_CHANGE) for d in different):
        write_resolved(run.job_json, wanted)
        stored, different = wanted, []
    if different:
        told = "; ".join(different[:_TOLD_DIFFERENCES])
        more = len(different) - _TOLD_DIFFERENCES
        raise ConfigError(
            f"{job_file}: run {run.name} has another job: {told}"
            + (f"; and {more} more" if more > 0 else ""),
            f"continue the run as it is: rlboost launch {run.name}; or end it: rlboost down {run.name};"
            f" or give {job_file.name} another name"
            if is_open(run)
            else f"undo the changes in {job_file.name}, or leave --resume out to start a new run",
        )
    changed = tuple(name for name in files_of(job) if _has_changed(job_file.parent / name, run.files / name))
    if resume and changed and not is_open(run):
        _renew_files(run, job_file, job)
        return FoundRun(run, stored, is_new=False, renewed_files=changed)
    return FoundRun(run, stored, is_new=False, changed_files=changed)


def _renew_files(run: RunFolder, job_file: Path, job: Job) -> None:
    """Copy the user's files again, all or none; the former copies stay in `files.previous`."""
    fresh = Path(tempfile.mkdtemp(dir=run.path, prefix=".files-"))
    former = run.former_files
    try:
        copy_files(job, job_file.parent, fresh)
        shutil.rmtree(former, ignore_errors=True)
        os.rename(run.files, former)
        os.rename(fresh, run.files)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _restore_files(run: RunFolder) -> None:
    """Where a killed command had put the copies away and no others in their place, put them back."""
    if not run.files.exists() and run.former_files.exists():
        os.rename(run.former_files, run.files)


def _has_changed(original: Path, copy: Path) -> bool:
    try:
        return original.is_file() and original.read_bytes() != copy.read_bytes()
    except OSError:
        return True


def flat_fields(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Yield the fields of a job that was read as JSON, each with its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat_fields(inner, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flat_fields(inner, f"{at}[{index}]")
    else:
        yield at, value


def _shown(values: dict[str, object], field: str) -> str:
    return json.dumps(values[field]) if field in values else "nothing"


# --- creating ----------------------------------------------------------------------------------------------


def _create(run: RunFolder, job_file: Path, job: Job, fork: ForkPoint | None) -> RunFolder | None:
    """Return the run, or None where somebody else made one of that name meanwhile."""
    run.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(run.path.parent) as is_alone:
        if is_alone:
            for left in run.path.parent.glob(f"{_WORKSHOP}*"):
                shutil.rmtree(left, ignore_errors=True)  # of a killed command
            if run.job_json.exists():
                return None  # made while this command waited for its turn
        return _make(run, job_file, job, fork)


@contextlib.contextmanager
def _alone(runs: Path) -> Iterator[bool]:
    """Let one command at a time make a run; yields False on a file system that cannot lock a folder."""
    fd = os.open(runs, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _make(run: RunFolder, job_file: Path, job: Job, fork: ForkPoint | None) -> RunFolder | None:
    def fill(draft: RunFolder) -> None:
        _fill(draft, job_file, job)
        if fork is not None:
            fork.plant(draft)

    return run if _built(run, fill) else None


def restore_run(run: RunFolder, fill: Callable[[RunFolder], None]) -> None:
    """Make `run` of what `fill` puts into a folder of that name, whole or not at all. Raises `ConfigError`
    where there is a run of that name."""
    runs = run.path.parent
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    workshop = f"{_RESTORING}{run.name}-"
    with locked(runs / f".{run.name}.restoring", waits=False) as is_alone:
        if is_alone:
            for left in runs.glob(f"{workshop}*"):
                shutil.rmtree(left, ignore_errors=True)  # of a killed command
        if not is_alone or run.path.exists() or not _built(run, fill, workshop):
            raise ConfigError(
                f"run {run.name} is on this machine already",
                f"rlboost launch {run.name} --resume continues it; to take the copy instead, first type"
                f" rlboost rm {run.name}",
            )


def _built(run: RunFolder, fill: Callable[[RunFolder], None], prefix: str = _WORKSHOP) -> bool:
    """Make a run's folder; return False where somebody else made one of that name meanwhile."""
    workshop = Path(tempfile.mkdtemp(dir=run.path.parent, prefix=prefix))
    try:
        draft = RunFolder(workshop / run.name)
        fill(draft)
        try:
            os.rename(draft.path, run.path)
        except OSError:
            if run.path.exists():
                return False
            raise
        return True
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _fill(draft: RunFolder, job_file: Path, job: Job) -> None:
    if job.rollout.engine == "vllm" and not job.trainer.is_elsewhere:
        find_engine_python(job.rollout.engine_args.python)  # better now than in every agent's log
    for folder in (draft.path, draft.files, draft.logs, draft.processes):
        folder.mkdir(mode=0o700)
    shutil.copyfile(job_file, draft.job_yaml)
    draft.job_source.write_text(f"{job_file.absolute()}\n")
    copy_files(job, job_file.parent, draft.files)
    write_resolved(draft.job_json, job.model_copy(update={"name": draft.name}))
    read_resolved(draft.job_json)  # what cannot be read back must not become a run
    _keep_environment(draft, job)
    if job.trainer.is_elsewhere:
        keep_place(draft, job)  # the rest is made there
        return
    if (address := address_of_head(job.trainer)) is not None:
        write_address(draft, address)
    create_secrets(draft)


def _keep_environment(run: RunFolder, job: Job) -> None:
    """Keep the job's variables where its head is this machine; else only see that there are all."""
    if job.trainer.is_elsewhere:
        gather(job)
    else:
        run.environment.parent.mkdir(mode=0o700, exist_ok=True)
        keep(run, job)


def _copy(source: Path, name: str, target: Path) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"{name} lies outside the job file's folder",
            "name files relative to the job file and below its folder: copy or link it there",
        )
    copy = target / path
    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        if (source / path).is_dir():
            shutil.copytree(source / path, copy, dirs_exist_ok=True)
        else:
            shutil.copyfile(source / path, copy)
    except OSError as exc:
        if exc.errno in DISK_ERRNOS:  # nothing is wrong with the file
            raise
        raise ConfigError(
            f"{name}: cannot be copied from {source}: {exc.strerror}", "see that it exists and can be read"
        ) from exc


def gather(job: Job, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the job's variables: secrets as this process's environment has them, else as `known` does.

    Raises `ConfigError`, naming the secrets that neither has.
    """
    found = {**(known or {}), **os.environ}
    if missing := [name for name in job.secrets if name not in found]:
        raise ConfigError(
            f"{', '.join(missing)}: not set in the environment",
            f"type: export {missing[0]}=..., or remove it from the job's secrets",
        )
    return {**job.env, **{name: found[name] for name in job.secrets}}


def keep(run: RunFolder, job: Job) -> None:
    """Write what the run's processes are to have; a value that was kept before holds where there is none now.

    Raises `ConfigError` like `gather`.
    """
    values = gather(job, kept(run))
    if values or run.environment.exists():
        write_json(run.environment, values)


def kept(run: RunFolder) -> dict[str, str]:
    """Return what the run's processes are to have."""
    return dict(read_json(run.environment) or {})
