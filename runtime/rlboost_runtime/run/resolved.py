"""The resolved job of a run: `job.json`, written once and read by every process of the run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import read_json, write_json


def write_resolved(path: Path, job: Job) -> None:
    """Write the resolved job, with a checksum."""
    write_json(path, json.loads(job.canonical_json()), durably=True)


def read_resolved(path: Path) -> Job:
    """Return the resolved job stored in `path`.

    Raises `FileNotFoundError`, `RuntimeFault` where the file is damaged, `ValueError` where it is another
    version's.
    """
    found = read_json(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return Job.model_validate_json(json.dumps(found))
