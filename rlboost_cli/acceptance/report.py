"""What an acceptance found, in a form that can be sent to others.

Guarantee: `scrubbed` is applied to every word that a cloud or a machine said. It removes values of secrets,
addresses, account and project numbers, access keys and the home folder.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlboost_providers.base.traits import known_clouds
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.run.folder import home, write_atomically

_PLACES = (
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}(?!\w)"), "<address>"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "<access key>"),
    (re.compile(r"\b\d{12}\b"), "<account>"),
    (re.compile(r"\bprojects/[a-z][a-z0-9-]{4,28}[a-z0-9]\b"), "projects/<project>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<account>"),
)


class Result(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that is over."""

    step: str
    shows: str
    """What the step is there to show."""
    result: Result
    found: str
    remedy: str = ""
    seconds: float = 0.0
    deadline_s: float = 0.0
    most_usd: float = 0.0
    """What the step could have cost at most: its deadline at the price of all machines."""
    exit_code: int = 0


@dataclass(slots=True)
class Report:
    """Everything that is sent in."""

    place: str
    via: str
    max_usd: float
    started_at: float
    run: str = ""
    spent_usd: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)

    def count(self, result: Result) -> int:
        """Return how many steps ended so."""
        return sum(step.result is result for step in self.steps)


def versions() -> dict[str, str]:
    """Return what the person types with."""
    return {
        "rlboost": version("rlboost"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def scrubbed(words: str, secrets: Iterable[str]) -> str:
    """Return `words` without what is nobody else's business. `secrets`: names of environment variables."""
    known = {name for traits in known_clouds().values() for name in traits.credential_variables}
    names = {*secrets, *known, "HF_TOKEN"}
    names |= {name for name in os.environ if re.search(r"PROJECT$|_(KEY|TOKEN|SECRET|PASSWORD)(_ID)?$", name)}
    values = {os.environ.get(name, "") for name in names}
    for value in sorted(values, key=len, reverse=True):
        if len(value) > 3:
            words = words.replace(value, "<secret>")
    words = words.replace(str(home()), "$RLBOOST_HOME").replace(str(Path.home()), "~")
    for pattern, place in _PLACES:
        words = pattern.sub(place, words)
    return words


def write_report(report: Report, stem: Path) -> None:
    """Write STEM.md and STEM.json, each whole. Raises `ConfigError`."""
    try:
        for suffix, text in ((".json", as_json(report)), (".md", as_markdown(report))):
            write_atomically(stem.with_name(stem.name + suffix), text.encode(), mode=0o644)
    except OSError as problem:
        raise ConfigError(
            f"{stem}.md cannot be written: {problem.strerror}", "choose another --output"
        ) from None


def read_steps(stem: Path, run: str) -> list[StepResult]:
    """Return the steps of the report at `stem`; [] where there is none, or it is of another run."""
    try:
        told: dict[str, Any] = json.loads(stem.with_name(stem.name + ".json").read_bytes())
        steps = [StepResult(**{**step, "result": Result(step["result"])}) for step in told["steps"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return steps if told.get("run") == run else []


def as_json(report: Report) -> str:
    """Return the report as JSON."""
    return json.dumps(asdict(report), indent=2) + "\n"


def as_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    spent = "not known" if report.spent_usd is None else f"${report.spent_usd:.4f}"
    rows = [_row(step) for step in report.steps]
    counts = ", ".join(f"{report.count(result)} {result}" for result in Result)
    return "\n".join(
        [
            f"# Acceptance of {report.place}, {report.via}",
            "",
            f"{counts}. Spent {spent} of ${report.max_usd:.2f}. "
            + ", ".join(f"{name} {what}" for name, what in report.versions.items())
            + ".",
            "",
            "| step | shows | result | found | seconds | bound |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "Bound: what the step alone could cost if it took its whole deadline, or the budget if that is"
            " less. Steps end long before: the bounds do not add up. All steps together stay within"
            f" ${report.max_usd:.2f}.",
            "",
        ]
    )


def lines_of(step: StepResult) -> Sequence[str]:
    """Return a step in words: what was found, and below it what to do."""
    first, *more = step.found.splitlines() or [""]
    indent = " " * 29
    lines = [f"{step.result:<12} {step.step:<15} {first}", *(f"{indent}{line}" for line in more)]
    return [*lines, f"{indent}{step.remedy}"] if step.remedy else lines


def _row(step: StepResult) -> str:
    found = step.found + (f" Remedy: {step.remedy}" if step.remedy else "")
    words = found.replace("|", "\\|").replace("\n", "<br>")
    time = f"{step.seconds:.0f} of {step.deadline_s:.0f}"
    return f"| {step.step} | {step.shows} | {step.result} | {words} | {time} | ${step.most_usd:.2f} |"
