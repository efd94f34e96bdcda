"""The one module that prints what went well (`errors` prints the rest).

What was asked for goes to standard output; everything else goes to standard error. Only the attached view
uses rich, imported when it starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlboost_cli import text

if TYPE_CHECKING:
    from pathlib import Path

    from rlboost_cli.attach import Outcome
    from rlboost_cli.run_status import RunStatus
    from rlboost_cli.teardown import Ending
    from rlboost_runtime.run_create import FoundRun
    from rlboost_runtime.run_folder import RunFolder


def show(words: str) -> None:
    """Print a piece of what was asked for."""
    print(words, flush=True)


def progress(words: str) -> None:
    """Print something beside what was asked for."""
    print(words, file=sys.stderr, flush=True)


def as_json(value: object) -> None:
    """Print one JSON object."""
    show(json.dumps(value, indent=1, allow_nan=False))


def as_yaml(value: object) -> None:
    """Print plain data as YAML."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt", pure=True)  # keeps the order of keys
    yaml.default_flow_style = False
    yaml.dump(value, sys.stdout)


def is_terminal() -> bool:
    """Whether a person reads standard output and can answer a question."""
    return sys.stdout.isatty() and sys.stdin.isatty()


def confirm(question: str) -> bool:
    """Ask; anything but yes is no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def runs(rows: Sequence[dict[str, Any]]) -> None:
    """Print the list of runs."""
    if rows:
        show(text.runs_table(rows))
    else:
        progress("no runs yet; rlboost launch job.yaml starts one")


def status(found: RunStatus) -> None:
    """Print one run's status, and how old it is where its coordinator does not answer."""
    staleness(found)
    show("\n".join(text.status_lines(found.data)))


def staleness(found: RunStatus) -> None:
    """Say so where a status is not from a living coordinator."""
    for line in text.staleness(found):
        progress(line)


def cost(report: dict[str, Any]) -> None:
    """Print a cost report."""
    show("\n".join(text.cost_lines(report)))


def cost_csv(report: dict[str, Any]) -> None:
    """Print a cost report's lines as CSV."""
    show(text.cost_csv(report))


def follow(statuses: Iterable[RunStatus], new_lines: Callable[[RunStatus], list[str]]) -> None:
    """Show statuses until they end: in place on a terminal, else a line per step and per event."""
    if is_terminal():
        _live(statuses)
        return
    for found in statuses:
        for line in new_lines(found):
            show(line)


def found_run(found: FoundRun) -> None:
    """Say which run was found or made."""
    progress(f"{'new run' if found.is_new else 'continuing run'} {found.run.name} in {found.run.path}")
    for name in found.changed_files:
        progress(f"note: {name} has changed since; the run keeps the copy it took")


def detached(run: RunFolder) -> None:
    """Say that the run goes on, and what can be done with it."""
    progress(f"detached; {run.name} goes on")
    progress(f"  rlboost launch {run.name}           watches it again")
    progress(f"  rlboost status {run.name} --watch   only looks")
    progress(f"  rlboost down {run.name}             ends it")


def outcome(run: RunFolder, ended: Outcome) -> None:
    """Say how a run ended."""
    if ended.state == "done":
        show(f"{run.name} is done; the model is in {run.checkpoints / 'model'}")
        return
    mark = "error: " if ended.exit_code else ""
    progress(f"{mark}{run.name} {ended.state}" + (f": {ended.problem}" if ended.problem else ""))
    progress(f"\nhint: {ended.remedy or f'rlboost logs {run.name} shows what happened'}")


def ending(run: RunFolder, ended: Ending) -> None:
    """Say what it took to end a run."""
    if ended.processes or ended.machines:
        progress(f"ended what was left: {len(ended.processes)} processes, {len(ended.machines)} machines")
    progress(f"nothing of {run.name} is left running")


def log_text(parts: Iterable[tuple[Path, str]], root: Path) -> None:
    """Print pieces of log files, each under its file's name."""
    for path, words in parts:
        progress(f"==> {path.relative_to(root)} <==")
        print(words, end="", flush=True)


def _live(statuses: Iterable[RunStatus]) -> None:
    from rich.live import Live

    from rlboost_cli.live_view import render

    with Live(auto_refresh=False) as view:
        for found in statuses:
            view.update(render(found), refresh=True)
