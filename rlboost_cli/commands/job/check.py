"""`rlboost check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check(
    job: Annotated[Path, typer.Argument(help="The job file", metavar="JOB", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
) -> None:
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
