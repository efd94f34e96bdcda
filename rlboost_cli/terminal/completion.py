"""What the shell offers for RUN and INSTANCE: read off the runs' folders, so that a key press stays quick.

Nothing here fails: a folder that cannot be read offers nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rlboost_runtime.protocol.status import Status
    from rlboost_runtime.run.folder import RunFolder


def runs(incomplete: str) -> list[tuple[str, str]]:
    """Return the runs whose name begins so, newest first, each with its state."""
    from rlboost_runtime.run.folder import read_json
    from rlboost_runtime.run.index import all_runs

    found = []
    try:
        for run in reversed(all_runs()):
            if run.name.startswith(incomplete):
                noted = read_json(run.outcome) or read_json(run.status) or {}
                found.append((run.name, str(noted.get("state", "provisioning"))))
    except (OSError, ValueError):
        return found
    return found


RunName = Annotated[
    str, typer.Argument(help="The run", metavar="RUN", show_default=False, autocompletion=runs)
]
"""The argument of commands that look at one run."""
JobFile = Annotated[Path, typer.Argument(help="The job file", metavar="JOB", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


def open_runs(incomplete: str) -> list[tuple[str, str]]:
    """Return the runs that have not ended."""
    return [(name, state) for name, state in runs(incomplete) if state not in ("done", "failed", "stopped")]


def jobs_and_runs(incomplete: str) -> list[str]:
    """Return job files (and folders on the way to them), then runs."""
    from glob import escape, glob
    from os.path import isdir

    paths = sorted(glob(f"{escape(incomplete)}*"))
    files = [p for p in paths if p.endswith((".yaml", ".yml"))] + [f"{p}/" for p in paths if isdir(p)]
    return [*files, *(name for name, _ in runs(incomplete))]


def instances(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the live spot instances of the run typed before, as its last status has them."""
    return [
        (i.id, i.state or "")
        for i in _status(ctx).instances
        if i.pool == "spot" and i.id.startswith(incomplete)
    ]


def logs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the processes and machines, also gone ones, that the run typed before has logs of."""
    folder = _run(ctx).logs
    try:
        names = [path.stem for path in folder.glob("*.log")]
        names += [path.name for path in (folder / "machines").glob("*")]
    except OSError:
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def metrics(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the metrics whose name begins so, each with its meaning."""
    from rlboost_runtime.health.glossary import GLOSSARY

    typed = ctx.params.get("names") or ()
    return [
        (m.name, m.meaning)
        for m in GLOSSARY.values()
        if m.name.startswith(incomplete) and m.name not in typed
    ]


def _status(ctx: typer.Context) -> Status:
    from rlboost_runtime.protocol.status import Status, read_status
    from rlboost_runtime.run.folder import read_json

    try:
        return read_status(read_json(_run(ctx).status) or {})
    except (OSError, ValueError):
        return Status()


def _run(ctx: typer.Context) -> RunFolder:
    from rlboost_runtime.run.folder import RunFolder

    return RunFolder.named(str(ctx.params.get("run") or ""))
