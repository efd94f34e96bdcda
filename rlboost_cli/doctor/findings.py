"""Findings of checks, and the diagnosis that they add up to.

A check is a function of a `DoctorContext` that yields findings; it never raises for what it is there to find.
Exit code: 0 where nothing failed; 6 where all that failed is credentials or quota (the job is right, the
account is not); else 2. Warnings do not count.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost_runtime.errors import ConfigError, CredentialsRejected, RLBoostError
from rlboost_runtime.job import Job

if TYPE_CHECKING:
    from rlboost_runtime.trainer.models.facts import ModelFacts

BAD_INPUT = ConfigError.exit_code
ACCOUNT = CredentialsRejected.exit_code
_INDENT = 19
"""Columns of verdict and check before what was found."""


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    """As it should be."""
    WARN = "warn"
    """It will run, but not as well as it could; or it could not be looked at."""
    FAIL = "fail"
    """It will not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination. `remedy` is empty where all is well."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    exit_code: int = BAD_INPUT
    """What the program ends with if this failed."""


def ok(check: str, found: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(check, Verdict.OK, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Return a warning."""
    return Finding(check, Verdict.WARN, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Return a failure."""
    return Finding(check, Verdict.FAIL, found, remedy)


def failed(check: str, error: RLBoostError) -> Finding:
    """Return the failure that an error stands for; one about credentials or quota keeps its exit code."""
    exit_code = ACCOUNT if error.exit_code == ACCOUNT else BAD_INPUT
    return Finding(check, Verdict.FAIL, error.problem, error.remedy, exit_code)


@dataclass(frozen=True)
class DoctorContext:
    """What is examined: this machine, and the job where one was given, with the machine of its head."""

    home: Path
    job: Job | None = None
    job_file: Path | None = None

    @property
    def wanted(self) -> Job:
        """The job, for checks that are made only where one was given."""
        assert self.job is not None
        return self.job

    @property
    def folder(self) -> Path:
        """Where the job's file is, and beside it what it names."""
        assert self.job_file is not None
        return self.job_file.absolute().parent

    @functools.cached_property
    def model(self) -> ModelFacts | RLBoostError | None:
        """The job's model; the error that it is; or None where its files are not on this machine."""
        from rlboost_runtime.trainer.models.facts import look_at_model

        try:
            return look_at_model(self.wanted)
        except RLBoostError as error:
            return error
        except LookupError:
            return None


Examine = Callable[[DoctorContext], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A part of the examination. `announce`: printed beforehand if it takes seconds."""

    examine: Examine
    announce: str = ""


@dataclass(slots=True)
class Diagnosis:
    """All findings so far."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """What the program ends with."""
        codes = {finding.exit_code for finding in self.findings if finding.verdict is Verdict.FAIL}
        if not codes:
            return 0
        return ACCOUNT if codes == {ACCOUNT} else BAD_INPUT

    def count(self, verdict: Verdict) -> int:
        """Return how many findings have the verdict."""
        return sum(finding.verdict is verdict for finding in self.findings)

    def as_json(self, context: DoctorContext) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "job": None if context.job is None else context.job.name,
            "ready": self.exit_code == 0,
            "exit_code": self.exit_code,
            "findings": [
                {"check": f.check, "verdict": str(f.verdict), "found": f.found, "remedy": f.remedy}
                for f in self.findings
            ],
        }


def lines_of(finding: Finding, width: int | None = None) -> Iterable[str]:
    """Return a finding in words: what was found, and below it what to do; broken between words at `width`."""
    head = f"{finding.verdict:<5} {finding.check:<12} "
    for line in (finding.found.splitlines() or [""]) + finding.remedy.splitlines():
        for part in _broken(line, width):
            yield f"{head}{part}"
            head = " " * len(head)


def _broken(line: str, width: int | None) -> list[str]:
    if width is None:
        return [line]
    room = max(30, width - _INDENT)
    return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]
