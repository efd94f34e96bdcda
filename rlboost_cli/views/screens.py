"""The one module that prints what went well (`errors` prints the rest).

Answers go to standard output; everything else goes to standard error. Only tables
on a terminal use rich, imported when they are drawn.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rlboost_cli.terminal import output, text
from rlboost_cli.terminal.screen import Line, Painter, Size, can_redraw, glyphs_for, has_style

if TYPE_CHECKING:
    from rlboost_cli.runs.metrics import MetricHistory
    from rlboost_cli.runs.run_status import RunStatus
    from rlboost_cli.runs.teardown import Teardown
    from rlboost_cli.views.live import Outcome
    from rlboost_runtime.billing.report import CostReport
    from rlboost_runtime.protocol.status import Status
    from rlboost_runtime.run.create import FoundRun
    from rlboost_runtime.run.folder import RunFolder

METRICS_WIDTH = 80
"""Most columns of the table of metrics."""


def status(found: RunStatus) -> None:
    """Print one run's status, and its age if the coordinator does not answer."""
    from rlboost_cli.views import run_view

    staleness(found)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else run_view.WIDEST
    output.show("\n".join(run_view.status_lines(found, glyphs_for(sys.stdout), width)))


def metrics(history: MetricHistory, chosen: list[str]) -> None:
    """Print a table of a run's metrics, each with its course."""
    from rlboost_cli.views.metrics import metric_lines

    width = min(shutil.get_terminal_size().columns, METRICS_WIDTH) if sys.stdout.isatty() else METRICS_WIDTH
    output.show("\n".join(metric_lines(history, chosen, glyphs_for(sys.stdout), width)))


def staleness(found: RunStatus) -> None:
    """Print a warning if a status is not from a live coordinator."""
    from rlboost_cli.views import run_view

    for line in run_view.staleness(found):
        output.progress(line)


def follow(statuses: Iterable[RunStatus]) -> None:
    """Show statuses until they end: in place on a terminal, else a line per step and per event."""
    from rlboost_cli.views.live import NewLines, watch

    if can_redraw(sys.stdout):
        watch(statuses, sys.stdout)
        return
    lines = NewLines()
    for found in statuses:
        for line in lines.of(found):
            output.show(line)


WATCH_ALL_EVERY_S = 2.0


def watch_all(look: Callable[[Callable[[str], None]], object]) -> None:
    """Show the list of runs until Ctrl-C; `look` asks the heads of open runs first. Raises `ConfigError`
    where standard output is no terminal."""
    from rlboost_cli.runs.run_status import runs_table
    from rlboost_runtime.errors import ConfigError

    if not can_redraw(sys.stdout):
        raise ConfigError(
            "--watch without a run needs a terminal", "name a run, or call rlboost status --json repeatedly"
        )
    painter, glyphs = Painter(sys.stdout, has_style=has_style(sys.stdout)), glyphs_for(sys.stdout)
    while True:
        look(lambda words: None)
        size = Size(*shutil.get_terminal_size())
        header, *rows = text.runs_table(runs_table()).splitlines()
        room = max(1, size.height - 2)
        lines = [Line(header, "header"), *(Line(row) for row in rows[-room:])]
        painter.paint([Line(glyphs.cut(line.text, size.width - 1), line.style) for line in lines], size)
        time.sleep(WATCH_ALL_EVERY_S)


def found_run(found: FoundRun) -> None:
    """Print which run was found or made."""
    output.progress(
        f"{'new run' if found.is_new else 'continuing run'} {found.run.name} in {text.tilde(found.run.path)}"
    )
    former, _, number = found.run.name.rpartition("-")
    if found.is_new and number.isdecimal() and found.run.path.with_name(former).exists():
        output.progress(f"note: there is an ended run {former}; rlboost launch {former} shows it")
    for name in found.changed_files:
        output.progress(f"note: {name} has changed; the run keeps its copy")
    for name in found.renewed_files:
        output.progress(f"note: {name} has changed; the run continues with the new version")


def served_at(run: RunFolder, url: str) -> None:
    """Print where the model is served, and with which key."""
    output.show(f"{run.name} is served at {url}/v1")
    output.progress(f"  key          {text.tilde(run.api_keys)}")
    output.progress(f"  certificate  {text.tilde(run.certificate)}")


def detached(run: RunFolder) -> None:
    """Print that the run goes on, and which commands apply to it."""
    costs = ", and costs money until it ends" if costs_money(run) else ""
    output.progress(f"detached; {run.name} is still running{costs}")
    output.progress(f"  rlboost launch {run.name}           re-attaches")
    output.progress(f"  rlboost status {run.name} --watch   watches without attaching")
    output.progress(f"  rlboost down {run.name}             stops it")


def left_alone(run: RunFolder) -> bool:
    """Print, after an interrupt, whether the run goes on by itself, and return that. With a head elsewhere it
    does so only once it was started there. A second interrupt meanwhile does not keep the lines back."""
    import signal

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from rlboost_cli.head.mirror import was_started

        goes_on = not run.head.exists() or was_started(run)
        (detached if goes_on else _not_started)(run)
        return goes_on
    finally:
        signal.signal(signal.SIGINT, before)


def costs_money(run: RunFolder) -> bool:
    """Return True if a cloud sends a bill for machines of the run."""
    from rlboost_runtime.run.folder import read_json

    job = read_json(run.job_json) or {}
    offers = [job.get("trainer", {}), *job.get("rollout", {}).get("spot", {}).get("any_of", [])]
    return any(offer.get("infra", "local") not in ("local", "ssh") for offer in offers)


def _not_started(run: RunFolder) -> None:
    output.progress(f"{run.name} has not been started on its head")
    output.progress(f"  rlboost launch {run.name}           starts it")
    if run.head_machines.exists():
        output.progress(f"  rlboost down {run.name}             ends the head, which costs money until then")


def outcome(run: RunFolder, ended: Outcome, status: Status, report: CostReport) -> None:
    """Print how a run ended, what it cost and what to type next."""
    from rlboost_cli.views import ending as ending_text

    output.show("\n".join(["", *ending_text.ended_lines(run.name, ended.state, status, report)]))
    model = text.tilde(run.checkpoints / "model")
    lines = ending_text.next_lines(
        run.name,
        ended.state,
        model,
        status.step,
        is_local=not costs_money(run),
        only_serves=status.serving is not None,
    )
    output.show("\n".join(lines))
    left(run)
    if ended.state == "done":
        return
    mark = "error: " if ended.exit_code else ""
    why = f"\n{mark}{run.name} {ended.state}" + (f": {ended.problem}" if ended.problem else "")
    hint = f"\nhint: {ended.remedy or f'rlboost logs {run.name} shows what happened'}"
    for words in (why, hint):
        output.progress(words)


def left(run: RunFolder) -> None:
    """Print a warning with the machines that may still cost money after a run's end, if there are any."""
    from rlboost_cli.views.ending import warning_lines
    from rlboost_cli.views.live import outcome_of
    from rlboost_runtime.billing.books import unsettled

    if lines := warning_lines(run.name, outcome_of(run).warning, unsettled(run)):
        output.progress("\n".join(["", *lines]))


def ending(run: RunFolder, ended: Teardown) -> None:
    """Print what had to be ended with a run."""
    if ended.processes or ended.machines:
        output.progress(f"stopped {len(ended.processes)} processes, {len(ended.machines)} machines")
    output.progress(f"nothing of {run.name} is still running")
