"""The real stack with failures: processes are killed as `rlboost chaos` kills them.

Engines and trainer are those of `benchmarks.paper_scale`, as slow as the simulator says. Everything else is
real: command line, supervisor, coordinator, agents, weight server, journal, ledger and recovery.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.ettr.failures import WARM_UP_STEPS, Failure
from benchmarks.ettr.simulated import Measured
from benchmarks.paper_scale.__main__ import rlboost, write_job
from benchmarks.paper_scale.scenario import STEPS, Scenario
from rlboost_cli.evidence.audit import audit_of
from rlboost_cli.evidence.chaos import FAULTS
from rlboost_runtime.run.folder import RunFolder

FAULT_OF = {"trainer": "trainer", "coordinator": "coordinator", "machine": "preempt"}
"""What `rlboost chaos` calls them."""
LOOK_S = 0.25
PATIENCE = 10.0
"""A step may take so many times the mean of one without failures."""


class Live:
    """One live run with its failures."""

    def __init__(
        self, name: str, scenario: Scenario, planned: list[Failure], steps: int, step_s: float
    ) -> None:
        self._scenario, self._planned = scenario, planned
        self._last, self._step_s = WARM_UP_STEPS + steps, step_s
        self._run = RunFolder.named(name)
        self._random = Random(f"ettr/{scenario.seed}")
        self._made: list[str] = []

    def run(self, folder: Path) -> tuple[Measured, list[str]]:
        """Live through all steps; return what was measured and what is wrong with the run."""
        rlboost(
            "launch",
            write_job(folder, self._run.name, self._scenario, None),
            "--yes",
            "--detach",
            "--no-doctor",
        )
        try:
            for failure in self._planned:
                self._wait_for(failure.step)
                time.sleep(failure.at * self._step_s)
                self._fail(failure)
            self._wait_for(self._last)
        finally:
            rlboost("down", self._run.name, "--yes")
        lived = self._lines()
        end_s = [line["began_wall"] + line["seconds"] for line in lived]
        tokens = sum(line["tokens"] for line in lived[WARM_UP_STEPS : self._last])
        problems = [problem for line in lived for problem in line["problems"]] + audit_of(self._run)[
            "problems"
        ]
        measured = Measured(end_s[self._last - 1] - end_s[WARM_UP_STEPS - 1], tokens, len(self._made))
        return measured, problems

    def _fail(self, failure: Failure) -> None:
        what = FAULTS[FAULT_OF[failure.kind]](self._run, self._random)
        print(
            f"step {failure.step}: {what or failure.kind + ': nothing to hit'}", file=sys.stderr, flush=True
        )
        if what:
            self._made.append(what)

    def _wait_for(self, step: int) -> None:
        """Wait until `step` is the one that is trained."""
        until = time.monotonic() + PATIENCE * self._step_s
        done = len(self._lines())
        while done < step:
            time.sleep(LOOK_S)
            now = len(self._lines())
            if now > done:
                done, until = now, time.monotonic() + PATIENCE * self._step_s
            if time.monotonic() > until or self._run.outcome.exists():
                raise SystemExit(f"step {done} of {self._run.name} does not end; see {self._run.path}")

    def _lines(self) -> list[dict[str, Any]]:
        path = self._run.path / STEPS
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
