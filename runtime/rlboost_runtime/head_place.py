"""Where a run's head is, if it is another machine: from the job, kept in the run's `head.json` here.

That file is part of the run's folder from the beginning, so that no head is ever asked for unnoted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import Job
from rlboost_runtime.run_folder import RunFolder, read_json, write_json


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """A machine that is reached by SSH, and where everything is kept on it."""

    host: str
    """Empty: the machine is not rented yet."""
    jump_host: str | None = None
    identity_file: str | None = None
    python: str | None = None
    """None: the one that is installed there."""
    folder: str = "~/.rlboost"
    host_key: str | None = None
    """Its public key, by which alone it is known; None: what `ssh` knows of it."""


def keep_place(run: RunFolder, job: Job) -> None:
    """Note where the run's head is to be, where that is another machine."""
    trainer = job.trainer
    if trainer.is_elsewhere:
        host = "" if trainer.is_bought else trainer.hosts[0]
        change_place(
            run,
            HeadPlace(host, trainer.jump_host, trainer.identity_file, trainer.python, trainer.folder),
        )


def change_place(run: RunFolder, place: HeadPlace) -> None:
    """Note where the run's head is."""
    write_json(run.head, asdict(place))


def kept_place(run: RunFolder) -> HeadPlace:
    """Return where the head of a run is that has one elsewhere. Raises `RuntimeFault`."""
    try:
        return HeadPlace(**(read_json(run.head) or {}))
    except TypeError as error:
        raise RuntimeFault(
            f"{run.head} does not say where the head of {run.name} is",
            "use the RLBoost version that the run was started with",
        ) from error
