"""What a run went through, from what it left on disk, and the simulation of the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.paper_scale.scenario import STEPS, Scenario
from rlboost_runtime.coordinator.storage.journal import read_events
from rlboost_runtime.core.base.messages import Assign, Finished, MachineLaunched, StepStarted
from rlboost_runtime.core.core import Core
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.sim import simulate
from rlboost_runtime.sim.responses import StepLengths, draw_lengths
from rlboost_runtime.traces import Trace


@dataclass(slots=True)
class Lived:
    """One run."""

    steps: list[dict[str, Any]]
    """Lines of the emulated trainer, one per whole step."""
    first_step_s: float
    """From the first machine, with which the market's time begins, to the first step."""
    kills: int
    latency_ms: dict[str, dict[str, float]]
    """dispatch: from the core's decision to the engine; report: from a response's last token to the core. The
    run's clock has another origin than the machine's: both ways' shortest are taken to be equal."""
    predicted_kills: int = 0
    windows: list[float] = field(default_factory=list)
    """Seeding window that was planned for each step, in seconds."""

    @property
    def problems(self) -> list[str]:
        """What was wrong with responses."""
        return [f"step {step['step']}: {problem}" for step in self.steps for problem in step["problems"]]

    def against_simulation(self, scenario: Scenario, market: Trace) -> list[dict[str, Any]]:
        """Simulate the same lengths on the same market; return a row per whole step."""
        if not self.steps:
            return []
        assumed = replace(scenario.preset.assumptions, startup_s=max(0.0, self.first_step_s))
        preset = replace(scenario.preset, assumptions=assumed)
        lengths = [_lengths(step) for step in self.steps]

        def lived(workload: Any, assumptions: Any, seed: int, step: int) -> StepLengths:
            known = step < len(lengths)
            return lengths[step] if known else draw_lengths(workload, assumptions, seed, step)

        with patch("rlboost_runtime.sim.trainer_model.draw_lengths", lived):
            found = simulate(preset, market, "rlboost", seed=scenario.seed, hours=1e3, max_steps=len(lengths))
        end_s = found.rows[-1].started_s + found.rows[-1].seconds
        self.predicted_kills = sum(kill.at_s <= end_s for kill in found.kills)
        return [
            {
                "step": step["step"],
                "lived_s": round(step["seconds"], 1),
                "predicted_s": round(row.seconds, 1),
                "off": round(step["seconds"] / row.seconds - 1.0, 4),
                "tokens": step["tokens"],
                "migrated": step["migrated"],
                "window_s": [round(window, 1), round(row.t_seed_s, 1)],
                "wait_s": [round(step["wait_s"], 1), round(row.wait_s, 1)],
                "train_s": [round(step["train_s"], 1), round(row.train_s, 1)],
                "predicted_spot": round(row.spot_instances, 2),
            }
            for step, row, window in zip(self.steps, found.rows, self.windows, strict=False)
        ]


def read_lived(run: RunFolder, scenario: Scenario) -> Lived:
    """Read the trainer's lines, the event log and the engines' notes of an ended run."""
    path = run.path / STEPS
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assigned: dict[int, float] = {}
    finished: dict[int, float] = {}
    assignment_of: dict[int, int] = {}
    windows: list[float] = []
    first_machine = first_step = 0.0
    core = Core()
    for event in read_events(run.events):
        if isinstance(event, StepStarted):
            first_step = first_step or event.at
            windows.append(core.seeding.t_seed_s)
        if isinstance(event, MachineLaunched):
            first_machine = first_machine or event.at
        if isinstance(event, Finished) and event.response in assignment_of:
            finished[assignment_of[event.response]] = event.at
        for command in core.handle(event):
            if isinstance(command, Assign):
                assigned[command.assignment] = event.at
                assignment_of[command.response] = command.assignment
    begun, ended = _engine_notes(run)
    dispatch = [begun[a] - at for a, at in assigned.items() if a in begun]
    report = [at - ended[a] for a, at in finished.items() if a in ended]
    ahead = (min(dispatch) - min(report)) / 2.0 if dispatch and report else 0.0
    market = run.cloud / "market.jsonl"
    kinds = [json.loads(line)["kind"] for line in market.read_text().splitlines()] if market.exists() else []
    return Lived(
        steps,
        first_step - first_machine,
        kinds.count("kill"),
        {
            "dispatch": _percentiles([seconds - ahead for seconds in dispatch]),
            "report": _percentiles([seconds + ahead for seconds in report]),
        },
        windows=windows,
    )


def _engine_notes(run: RunFolder) -> tuple[dict[int, float], dict[int, float]]:
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}
    for what, assignment, at in _lines(run):
        if what == "begin":
            begun[assignment] = at
        elif what in ("stop", "length"):
            ended[assignment] = at
    return begun, ended


def _lines(run: RunFolder) -> Iterator[tuple[str, int, float]]:
    for path in run.path.rglob("engine-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                what, assignment, at = json.loads(line)
            except ValueError:
                continue  # cut by a kill
            yield what, assignment, at


def _lengths(step: dict[str, Any]) -> StepLengths:
    pairs = [pair for group in step["lengths"] for pair in group]
    return StepLengths(tuple(prompt for prompt, _ in pairs), tuple(tokens for _, tokens in pairs))


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds, and the number."""
    if not seconds:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0, "count": 0}
    p50, p99 = np.percentile(seconds, [50, 99])
    values = {"p50": 1e3 * p50, "p99": 1e3 * p99, "max": 1e3 * max(seconds)}
    return {name: round(float(value), 1) for name, value in values.items()} | {"count": len(seconds)}
