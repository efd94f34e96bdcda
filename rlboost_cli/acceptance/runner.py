"""Taking the steps of an acceptance, one after another, within their deadlines and the budget.

Guarantees: a step that passes its deadline is given up; no step begins, or goes on, once the machines' price
and age leave only what ending them may cost; after a failure, an interrupt or SIGTERM the cleaning steps are
taken all the same; the report is written after each step. Where this process is killed, nothing here is
needed: the run's coordinator holds the budget, the head ends itself when nobody asks it anything, and at
`after.max_hours` whatever happens; agents without a head end after 15 minutes. The next command then only
takes the cleaning steps.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rlboost_cli.acceptance.report import Report, Result, StepResult, read_steps, scrubbed, write_report
from rlboost_cli.acceptance.steps import CLEANING, STEPS, Contact, NotChecked, Say, Step
from rlboost_cli.acceptance.trial_job import Trial
from rlboost_cli.terminal.errors import known
from rlboost_runtime.billing.books import report_of
from rlboost_runtime.billing.launch_records import current_head_machine, kept_head_machines
from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.run.create import newest_run, stored_job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.index import is_open

BUDGET = 5
"""Exit code of a command that the budget ended."""


class DeadlinePassed(BaseException):
    """A step has had its time; no `except Exception` on the way may keep it."""


class Runner:
    """One acceptance."""

    def __init__(self, trial: Trial, report: Report, stem: Path, say: Say, show: Any) -> None:
        """`show` is called with each `StepResult`; `stem`: where the report goes, without a suffix."""
        self._trial = trial
        self._report = report
        self._stem = stem
        self._show = show
        self._contact = Contact(trial, say)

    def check(self) -> Report:
        """Take all steps, and clean up. Raises nothing that a step does."""
        stopped = ""
        try:
            for step in STEPS:
                if stopped:
                    self._keep(step, Result.NOT_CHECKED, stopped)
                    continue
                result = self._take(step)
                self._report.run = "" if self._contact.run is None else self._contact.run.name
                if result.result is Result.FAILED and (step.is_needed or result.exit_code == BUDGET):
                    stopped = f"{step.name} failed"
        except KeyboardInterrupt:
            self._keep(step, Result.NOT_CHECKED, "interrupted")
        if self._contact.run is not None:
            self._clean()
        return self._report

    def clean(self, run: RunFolder) -> Report:
        """End what a former command that was killed has left, and complete its report."""
        self._contact.run = run
        self._report.run = run.name
        self._report.steps = read_steps(self._stem, run.name)
        done = {step.step for step in self._report.steps}
        for step in STEPS:
            if step.name not in done:
                self._keep(step, Result.NOT_CHECKED, "the command was killed before")
        self._clean()
        return self._report

    def _clean(self) -> None:
        for step in CLEANING:
            try:
                self._take(step)
            except KeyboardInterrupt:  # once more: this is what must not be left out
                self._take(step)
        self._note_cost()

    def _take(self, step: Step) -> StepResult:
        """Take a step within its deadline and the budget, and keep what came of it."""
        began, left_s = time.monotonic(), self._budget_s()
        is_cleaning = step in CLEANING
        limit_s = step.deadline_s if is_cleaning or not step.is_paid else min(step.deadline_s, left_s)
        if limit_s <= 0:
            return self._keep(step, Result.FAILED, *self._over_budget(), code=BUDGET)
        try:
            with _deadline(limit_s):
                found = step.check(self._contact)
            return self._keep(step, Result.PASSED, found, began=began)
        except DeadlinePassed:
            if limit_s < step.deadline_s:
                return self._keep(step, Result.FAILED, *self._over_budget(), began=began, code=BUDGET)
            words = f"not over within {step.deadline_s:.0f} s"
            return self._keep(step, Result.FAILED, words, step.remedy, began=began, code=1)
        except NotChecked as nothing:
            return self._keep(step, Result.NOT_CHECKED, f"not checked here: {nothing.problem}", began=began)
        except RLBoostError as error:
            remedy = error.remedy or step.remedy
            return self._keep(step, Result.FAILED, error.problem, remedy, began=began, code=error.exit_code)
        except Exception as problem:  # noqa: BLE001 whatever it is: machines that cost money must be ended
            told = known(problem) or RLBoostError(f"{type(problem).__name__}: {problem}", step.remedy)
            return self._keep(step, Result.FAILED, told.problem, told.remedy, began=began, code=1)

    def _budget_s(self) -> float:
        """Return how long the machines may go on before they are ended, by the age of the head."""
        run = self._contact.run
        machines = [] if run is None else kept_head_machines(run)
        if not machines:
            return self._trial.life_s
        return machines[0].intended_at + self._trial.life_s - time.time()

    def _over_budget(self) -> tuple[str, str]:
        return (
            f"${self._trial.max_usd:g} may be spent after this: it is not begun, or given up",
            "raise --max-usd, or look at what took so long in the steps before",
        )

    def _keep(
        self,
        step: Step,
        result: Result,
        found: str,
        remedy: str = "",
        *,
        began: float | None = None,
        code: int = 0,
    ) -> StepResult:
        kept = self._result(step, result, found, remedy, began, code)
        self._report.steps.append(kept)
        self._note_cost()
        write_report(self._report, self._stem)
        self._show(kept)
        return kept

    def _result(
        self,
        step: Step,
        result: Result,
        found: str,
        remedy: str = "",
        began: float | None = None,
        code: int = 0,
    ) -> StepResult:
        secrets = self._trial.job.secrets
        most_usd = self._trial.usd_per_hour * step.deadline_s / 3600 if step.is_paid else 0.0
        return StepResult(
            step.name,
            step.shows,
            result,
            scrubbed(found, secrets),
            scrubbed(remedy, secrets),
            0.0 if began is None else round(time.monotonic() - began, 1),
            step.deadline_s,
            round(min(most_usd, self._trial.max_usd), 4),
            code,
        )

    def _note_cost(self) -> None:
        run = self._contact.run
        if run is not None and run.ledger.exists():
            with contextlib.suppress(RLBoostError):
                self._report.spent_usd = report_of(run).total_usd


def left_over(name: str) -> RunFolder | None:
    """Return the run of a former acceptance whose machines may still cost money; None: there is none."""
    run = newest_run(name)
    if run is None:
        return None
    machine = current_head_machine(run)
    return run if is_open(run) or (machine is not None and machine.ended_at is None) else None


def trial_of(run: RunFolder, trial: Trial) -> Trial:
    """Return the trial of a run that a former command made."""
    return Trial(stored_job(run), trial.job_file, trial.max_usd, trial.usd_per_hour)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Take SIGTERM and SIGHUP for Ctrl-C, after which the machines are ended."""
    former = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `DeadlinePassed` in the main thread after `seconds`, whatever it waits for."""

    def over(number: int, frame: FrameType | None) -> None:
        raise DeadlinePassed

    former = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
