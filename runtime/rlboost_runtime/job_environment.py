"""`env` and `secrets` of a job: what the processes on the head have in their environment.

Secrets are named in the job and taken from the environment of whoever types; their values lie in the run's
`secrets/environment.json` (mode 600) on the head, so that the run goes on after a restart of the machine.
Neither reaches a spot machine, a log or an argument.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job
from rlboost_runtime.run_folder import RunFolder, read_json, write_json


def gather(job: Job, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the job's variables: secrets as this process's environment has them, else as `known` does.

    Raises `ConfigError`, naming the secrets that neither has.
    """
    found = {**(known or {}), **os.environ}
    if missing := [name for name in job.secrets if name not in found]:
        raise ConfigError(
            f"secrets: {', '.join(missing)}: not set in the environment",
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
