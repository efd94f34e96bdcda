"""The one module that prints what went well (`errors` prints the rest).

What was asked for goes to standard output; everything else goes to standard error. Only tables
on a terminal use rich, imported when they are drawn.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rlboost_cli.terminal import text
from rlboost_cli.terminal.screen import between_words, can_redraw, glyphs_for

if TYPE_CHECKING:
    from pathlib import Path

    from rlboost_cli.live.attach import Outcome
    from rlboost_cli.runs.run_status import RunStatus
    from rlboost_cli.runs.teardown import Ending
    from rlboost_cli.terminal.working import Working
    from rlboost_runtime.run_create import FoundRun
    from rlboost_runtime.run_folder import RunFolder

_waiting: Working | None = None
"""The last sign of life that was asked for: it makes room for other lines."""


def show(words: str) -> None:
    """Print a piece of what was asked for."""
    print(words, flush=True)


def progress(words: str) -> None:
    """Print something beside what was asked for."""
    with _waiting.aside() if _waiting is not None else nullcontext():
        print(between_words(words, sys.stderr), file=sys.stderr, flush=True)


def as_json(value: object) -> None:
    """Print one JSON object."""
    show(json.dumps(value, indent=1, allow_nan=False))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under headers: drawn by rich where standard output is a terminal, else aligned text."""
    if not sys.stdout.isatty():
        show(text.table(headers, rows))
        return
    from rich.console import Console

    from rlboost_cli.terminal.rich_tables import rich_table

    Console().print(rich_table(headers, rows))


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
    from rlboost_cli.live import run_view

    staleness(found)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else run_view.WIDEST
    show("\n".join(run_view.status_lines(found, glyphs_for(sys.stdout), width)))


def staleness(found: RunStatus) -> None:
    """Say so where a status is not from a living coordinator."""
    from rlboost_cli.live import run_view

    for line in run_view.staleness(found):
        progress(line)


def cost(report: dict[str, Any]) -> None:
    """Print a cost report."""
    from rlboost_cli.money.cost_text import cost_lines

    show("\n".join(cost_lines(report)))


def cost_csv(report: dict[str, Any]) -> None:
    """Print a cost report as CSV."""
    from rlboost_cli.money.cost_csv import cost_csv as csv_table

    show(csv_table(report))


def follow(statuses: Iterable[RunStatus]) -> None:
    """Show statuses until they end: in place on a terminal, else a line per step and per event."""
    from rlboost_cli.live.live_view import watch
    from rlboost_cli.live.plain_lines import NewLines

    if can_redraw(sys.stdout):
        watch(statuses, sys.stdout)
        return
    lines = NewLines()
    for found in statuses:
        for line in lines.of(found):
            show(line)


def working(words: str = "") -> Working:
    """Return a sign of life for a wait that may take more than a moment; enter it, call it with words."""
    from rlboost_cli.terminal.working import Working

    global _waiting
    width = shutil.get_terminal_size().columns
    _waiting = Working(sys.stderr, words, can_redraw=can_redraw(sys.stderr), width=width)
    return _waiting


def found_run(found: FoundRun) -> None:
    """Say which run was found or made."""
    progress(
        f"{'new run' if found.is_new else 'continuing run'} {found.run.name} in {text.tilde(found.run.path)}"
    )
    for name in found.changed_files:
        progress(f"note: {name} has changed since; the run keeps the copy it took")
    for name in found.renewed_files:
        progress(f"note: {name} has changed since; the run goes on with the new one")


def detached(run: RunFolder) -> None:
    """Say that the run goes on, and what can be done with it."""
    progress(f"detached; {run.name} goes on")
    progress(f"  rlboost launch {run.name}           watches it again")
    progress(f"  rlboost status {run.name} --watch   only looks")
    progress(f"  rlboost down {run.name}             ends it")


def left_alone(run: RunFolder) -> bool:
    """Say, where a command was interrupted, whether the run goes on by itself, and return that: with a head
    elsewhere not before it was started there."""
    from rlboost_cli.head.mirror import was_started

    if not run.head.exists() or was_started(run):
        detached(run)
        return True
    _not_started(run)
    return False


def _not_started(run: RunFolder) -> None:
    progress(f"{run.name} has not been started on its head")
    progress(f"  rlboost launch {run.name}           goes on with that")
    if run.rentals.exists():
        progress(f"  rlboost down {run.name}             ends the head, which costs money until then")


def outcome(run: RunFolder, ended: Outcome, status: dict[str, Any], report: dict[str, Any]) -> None:
    """Say how a run ended, what it cost and what to type next."""
    from rlboost_cli.live import ending_text

    show("\n".join(["", *ending_text.ended_lines(run.name, ended.state, status, report)]))
    model = text.tilde(run.checkpoints / "model")
    show("\n".join(ending_text.next_lines(run.name, ended.state, model, int(status.get("step") or 0))))
    if ended.state == "done":
        return
    mark = "error: " if ended.exit_code else ""
    why = f"\n{mark}{run.name} {ended.state}" + (f": {ended.problem}" if ended.problem else "")
    hint = f"\nhint: {ended.remedy or f'rlboost logs {run.name} shows what happened'}"
    for words in (why, hint):
        progress(words)


def ending(run: RunFolder, ended: Ending) -> None:
    """Say what it took to end a run."""
    if ended.processes or ended.machines:
        progress(f"ended what was left: {len(ended.processes)} processes, {len(ended.machines)} machines")
    progress(f"nothing of {run.name} is left running")


def log_text(parts: Iterable[tuple[Path, str]], root: Path) -> bool:
    """Print pieces of log files, each under its file's name; return whether there were any."""
    has_any = False
    for path, words in parts:
        has_any = True
        progress(f"==> {path.relative_to(root)} <==")
        print(words, end="", flush=True)
    return has_any
