"""`launch`, `runs` and `Run`: the commands of `rlboost` as functions.

What takes long says so on standard error, as the commands do; nothing asks a question.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.notebook import follow_in_notebook, live_html
from rlboost_cli.runs.files import Tail, sample_rows, samples_of
from rlboost_cli.runs.metrics import history_of
from rlboost_cli.runs.refresh import look_at
from rlboost_cli.runs.run_status import run_status
from rlboost_cli.terminal import errors, output
from rlboost_cli.views import screens
from rlboost_cli.views.live import Outcome, follow, outcome_of
from rlboost_cli.views.log_lines import LogLines
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.report import CostReport
from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.protocol.status import Status
from rlboost_runtime.run.index import all_runs, find_run, is_open

if TYPE_CHECKING:
    from pandas import DataFrame


class StillOpen(RuntimeFault, TimeoutError):
    """The run has not ended within the time that `Run.wait` was given; it continues."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise an explained error for a disk that cannot be used or a package that is not installed."""
    try:
        yield
    except RLBoostError:
        raise
    except (OSError, ImportError) as problem:
        explanation = errors.known(problem)
        if explanation is None:
            raise
        raise explanation from problem


@_explained()
def launch(
    job: str | os.PathLike[str] | Mapping[str, Any],
    *,
    yes: bool = False,
    resume: bool = False,
    start: str | None = None,
    checks: bool = True,
) -> Run:
    """Start a run, or continue one, and return it once its coordinator answers.

    Like `rlboost launch --detach`: the run goes on when Python ends.

    Args:
        job: The path of a job file, the name of a run, or the fields of a job as a mapping. Files that a
            mapping names are relative to the working directory.
        yes: Agree to the plan, which is printed. Needed where a cloud sends a bill.
        resume: Continue a run that has ended, from its last checkpoint.
        start: Start a new run from a checkpoint of another, "RUN@STEP" or "RUN" for its newest.
        checks: Try data, reward, engine and secrets first.

    Raises:
        ConfigError: A mistake in the job; `yes` is needed; the run has ended and `resume` is False.
        NotFound: No such run.
        ProviderError: A cloud refuses, or cannot be reached.
        RuntimeFault: The processes do not start, or the disk is full.
    """
    from rlboost_cli.planning.launching import prepared
    from rlboost_cli.runs.supervision import bring_up, want_training

    with _job_file(job) as path_or_run:
        run = prepared(path_or_run, None, resume=resume, start=start, yes=yes, checks=checks)
    want_training(run)
    with output.working() as say:
        bring_up(run, say)
    return Run(run.name)


def runs() -> list[Run]:
    """Return all runs of this machine, past ones too, oldest first."""
    return [Run(run.name) for run in all_runs()]


class Run:
    """A run of this machine's `$RLBOOST_HOME`, by its name.

    Each method reads the run anew. In a notebook it shows itself as it is now; `watch` keeps that up to date.
    """

    def __init__(self, name: str) -> None:
        """Raises `NotFound`, naming the runs that there are."""
        self._folder = find_run(name)

    @property
    def name(self) -> str:
        """The run's name."""
        return self._folder.name

    @property
    def path(self) -> Path:
        """The run's folder: checkpoints, logs and what else it keeps."""
        return self._folder.path

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended, with `state`, `problem` and `remedy`; None while it is open."""
        return None if is_open(self._folder) else outcome_of(self._folder)

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @_explained()
    def status(self) -> Status:
        """Return the run's status: from its coordinator, else the last one known.

        The fields are those of `rlboost status RUN --json`. Where the coordinator does not answer, a note on
        standard error says so, and `Status.at` tells how old the status is.
        """
        found = run_status(self._folder)
        screens.staleness(found)
        return found.status

    @_explained()
    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait until the run has ended and return how: `Outcome.state` is "done", "failed" or "stopped".

        Results of a head elsewhere are fetched then. `timeout`: in seconds; None waits without end.

        Raises:
            StillOpen: The time is over. It is a `TimeoutError`.
            RuntimeFault: Nothing runs the run any more, although it has not ended.
        """
        from rlboost_cli.planning.launching import collected

        deadline = None if timeout is None else time.monotonic() + timeout
        for found in follow(self._folder):
            if not found.has_ended and deadline is not None and time.monotonic() >= deadline:
                raise StillOpen(
                    f"{self.name} has not ended within {timeout:g} s: it is at step {found.status.step}",
                    "call wait again, or down to end it",
                )
        return collected(self._folder)

    def watch(self) -> None:
        """Show the run, live, until it ends; an interrupt ends the watching and not the run.

        In a notebook the view stays in its cell. Elsewhere it is that of `rlboost status RUN --watch`.
        """
        with contextlib.suppress(KeyboardInterrupt):
            if not follow_in_notebook(self._folder):
                screens.follow(follow(self._folder))

    @_explained()
    def cost(self) -> CostReport:
        """Return what the run has cost so far, with the fields of `rlboost cost RUN --json`."""
        look_at(self._folder, output.progress, ledger=True)
        return report_of(self._folder)

    @_explained()
    def metrics(self, *names: str) -> DataFrame | list[dict[str, Any]]:
        """Return the metrics, a row per trained step: a data frame, or dictionaries where pandas is missing.

        Column `step` counts from 1. `names`: those metrics only; docs/metrics.md lists them. Raises
        `ConfigError` for a name that nobody knows.
        """
        look_at(self._folder, output.progress, logs=True)
        history = history_of(self._folder)
        chosen = history.chosen(list(names), every=True)
        columns = [history.values(name) for name in chosen]
        values = zip(history.steps, *columns, strict=True)
        return _table([dict(zip(("step", *chosen), row, strict=True)) for row in values])

    @_explained()
    def samples(self, step: int | None = None) -> DataFrame | list[dict[str, Any]]:
        """Return a step's best, median and worst response with prompt and reward, or those of all steps, as
        `metrics` returns rows.

        They are examples to read: statistics over them are biased, and those over all responses are in
        `metrics`. `step` counts from 1. Raises `NotFound` where the run has no samples of it.
        """
        look_at(self._folder, output.progress, logs=True)
        if step is None:
            return _table(sample_rows(self._folder, limit=None))
        return _table(samples_of(self._folder, step)["samples"])

    @_explained()
    def logs(self, of: str | None = None, *, lines: int = 100) -> str:
        """Return the logs as `rlboost logs` prints them, the oldest line first.

        Args:
            of: An instance, a machine, or a process of the head such as "coordinator"; None: all of the head.
            lines: The last lines of each file; 0 for all.

        Raises:
            NotFound: There are no logs of it.
        """
        look_at(self._folder, output.progress, logs=True)
        tail = Tail(self._folder, of, lines)
        return "\n".join(LogLines(self._folder.logs).of(tail.read()))

    @_explained()
    def down(self) -> CostReport:
        """End the run and release its machines; its checkpoints stay. Return what it cost.

        Takes up to about a minute, and is over at once for a run that has ended.

        Raises:
            RuntimeFault: Something cannot be ended.
            ProviderError: A cloud cannot be asked; the error names what may still cost money.
        """
        from rlboost_cli.runs.teardown import end_run

        with output.working() as say:
            end_run(self._folder, say)
        return report_of(self._folder)

    def _repr_html_(self) -> str:
        return live_html(run_status(self._folder))


def _table(rows: list[dict[str, Any]]) -> DataFrame | list[dict[str, Any]]:
    try:
        from pandas import DataFrame
    except ImportError:
        return rows
    return DataFrame(rows)


@contextlib.contextmanager
def _job_file(job: str | os.PathLike[str] | Mapping[str, Any]) -> Iterator[str]:
    """Yield what `rlboost launch` would be given; a mapping becomes a file in the working directory, which is
    gone afterwards: the run has its own copy."""
    if not isinstance(job, Mapping):
        yield os.fspath(job)
        return
    from rlboost_runtime.job.file.load import JobErrors

    with tempfile.NamedTemporaryFile("w", dir=".", prefix="job-", suffix=".yaml") as file:
        json.dump(dict(job), file)  # YAML 1.2
        file.flush()
        try:
            yield f"./{Path(file.name).name}"
        except JobErrors as mistakes:
            lines = re.sub(rf"(?m)^\S*{re.escape(Path(file.name).name)}:\d+: ", "job: ", mistakes.problem)
            raise JobErrors(lines, "correct the fields, then call launch again") from None
