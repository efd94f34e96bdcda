"""`rlboost launch --resume URL`: a new head goes on from the copy that a lost one left at its job's `output`.

In order: what this machine lacks is said first, then the former head has to be silent, then this machine
becomes the head (`backup.fence`), then everything is brought here, the machines of the former head are
ended and its books closed, and last the run's folder gets its name. Whatever is cut off can be repeated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from rlboost_cli.head.head_books import learn_intents
from rlboost_cli.terminal import extras, output
from rlboost_cli.terminal.errors import require_room
from rlboost_cli.terminal.text import counted, duration
from rlboost_runtime.backup.layout import HeadState
from rlboost_runtime.backup.restore import download, find_copy, job_of, take_over
from rlboost_runtime.billing.books import close_books
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job, LocalOffer
from rlboost_runtime.run.bucket import open_bucket, url_of
from rlboost_runtime.run.create import gather, keep, restore_run
from rlboost_runtime.run.folder import RunFolder, home, write_json
from rlboost_runtime.run.head import address_of_head, write_address
from rlboost_runtime.run.resolved import write_resolved
from rlboost_runtime.run.security import create_secrets
from rlboost_runtime.supervisor.machines import end_machines

REQUEST_S = 60.0
"""Longest time of one request, with the library's own retries."""


def resume_from_copy(place: str, address: str | None, question: str | None, *, yes: bool) -> RunFolder:
    """Return the run whose copy is at `place`, OUTPUT/RUN, restored here and open.

    `address`: where machines elsewhere reach this one. `question`: None for a program, which is asked
    nothing. Raises `ConfigError`, `NotFound`, `RuntimeFault`, and what the clouds do.
    """
    url = url_of(place).rstrip("/")
    bucket = open_bucket(url, REQUEST_S, what="the copy at")
    with output.working("looking at the copy of the head"):
        state = find_copy(bucket, url)
        job = _for_this_machine(job_of(bucket, state, url), address)
    run = RunFolder.named(state.run)
    require_room(home() / "runs")
    extras.require(job)
    gather(job)
    age = duration(max(0.0, time.time() - state.at))
    output.progress(f"{state.run}: copy of its head, {age} old; what came after it is lost")
    _agree(job, question, yes=yes)

    with output.working("becoming the head") as say:

        def fill(draft: RunFolder) -> None:
            for folder in (draft.path, draft.files, draft.logs, draft.processes):
                folder.mkdir(mode=0o700)
            take_over(bucket, draft, state, url, say)
            found = download(bucket, state, draft, url, say)
            _complete(draft, job, url, state)
            _settle(draft, job, state, say)
            for problem in found.problems:
                output.progress(f"note: {problem}")
            step = int(found.checkpoint.rpartition("-")[2] or -1) + 1
            output.progress(
                f"{state.run} continues after step {step}" if step else f"{state.run} begins with its model"
            )

        restore_run(run, fill)
    return run


def _for_this_machine(job: Job, address: str | None) -> Job:
    """Return the job with this machine as its head. Raises `ConfigError` where it lacks something."""
    trainer = job.trainer
    if trainer.script is not None:
        raise ConfigError(
            f"{job.name} has a trainer of its own, {trainer.script}, which keeps its own checkpoints",
            "start a new run; its checkpoints are not copied (docs/limits.md)",
        )
    if isinstance(job.model, str) and os.path.isabs(job.model) and not Path(job.model).exists():
        raise ConfigError(f"the model {job.model} is not on this machine", "copy it to the same place here")
    if trainer.address is not None and address is None:
        raise ConfigError(
            f"the machines of {job.name} reached its lost head at {trainer.address}",
            "add --address HOST: a name or IP address at which they reach this machine",
        )
    changes: dict[str, object] = {} if address is None else {"address": address}
    if address is not None and trainer.nodes > 1 and trainer.node_address is not None:
        changes["node_address"] = f"{address}:{trainer.node_address.rpartition(':')[2]}"
    return job.model_copy(update={"trainer": trainer.model_copy(update=changes)})


def _agree(job: Job, question: str | None, *, yes: bool) -> None:
    """Ask before machines are rented. Raises like `output.require_consent`."""
    if not yes and not all(isinstance(offer, LocalOffer) for offer in job.rollout.spot.any_of):
        output.require_consent(question, "that")


def _complete(draft: RunFolder, job: Job, url: str, state: HeadState) -> None:
    """Write what a head has of its own."""
    write_resolved(draft.job_json, job)
    create_secrets(draft)
    keep(draft, job)
    if (address := address_of_head(job.trainer)) is not None:
        write_address(draft, address)
    write_json(draft.restored, {"url": url, "at": state.at, "taken": False}, durably=True)


def _settle(draft: RunFolder, job: Job, state: HeadState, say: Callable[[str], None]) -> None:
    """End the machines that the former head launched, which cannot be adopted: their credentials were on its
    disk. Close its books."""
    say("ending the machines of the former head")
    learn_intents(draft)
    ended = end_machines(job, draft, say, owner=state.owner)
    close_books(draft, ended.views, "its head was lost", lost_at=state.at)
    if ended.machines:
        output.progress(f"ended {counted(len(ended.machines), 'machine')} of the former head")
