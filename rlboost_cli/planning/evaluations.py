"""What a job's evaluations add to its plan: tokens that are not trained on, their time and their cost.

Their prompts are rolled out with a step's, by the same engines; those of the final weights by themselves. The
rate is that of the simulated run: trained tokens per second of an engine that rolls out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rlboost_runtime.job import Job
from rlboost_runtime.job.evaluation import Evaluation, EvaluationDataset, EvaluationFile, EvaluationGym
from rlboost_runtime.sim import Preset
from rlboost_runtime.sim.responses import draw_lengths
from rlboost_runtime.sim.result import StepRow

LENGTHS = 64
"""Prompts of which response lengths are drawn, for their mean."""


@dataclass(frozen=True, slots=True)
class PlannedEvaluations:
    """Of a whole run."""

    times: int
    """How often weights are evaluated."""
    tokens: float
    notes: tuple[str, ...] = ()
    """What could not be counted."""

    def seconds(self, rows: Sequence[StepRow], preset: Preset) -> float:
        """Return the time that they add to the run of which `rows` were simulated."""
        engines = preset.reserved_engines
        busy_s = sum(row.spot_instances * row.seconds + engines * row.seeded_s for row in rows)
        all_engines = engines + fmean(row.spot_instances for row in rows)
        rate = sum(row.tokens for row in rows) / busy_s if busy_s else 0.0
        return self.tokens / (rate * all_engines) if rate and self.tokens else 0.0


def planned_evaluations(job: Job, folder: Path, preset: Preset) -> PlannedEvaluations:
    """Return what the evaluations of `job`, whose files are in `folder`, generate."""
    updates = range(job.algorithm.steps + 1)
    times, tokens, notes = set[int](), 0.0, []
    for each in job.evaluations:
        due = [done for done in updates if each.is_due(done, job.algorithm.steps)]
        prompts = _prompts(each, folder)
        if prompts is None:
            name = "" if each.name is None else f" {each.name}"
            notes.append(f"evaluation{name} is not counted: give it prompts, how many is not known here")
            continue
        times.update(due)
        responses = prompts * (each.samples or job.algorithm.group_size)
        tokens += len(due) * responses * _mean_tokens(each, preset)
    return PlannedEvaluations(len(times), tokens, tuple(notes))


def _mean_tokens(each: Evaluation, preset: Preset) -> float:
    """Return the mean length of its responses: like those that are trained on, up to its own limit."""
    limit = each.max_tokens or preset.workload.max_response_tokens
    workload = replace(preset.workload, prompts=LENGTHS, max_response_tokens=limit)
    return fmean(draw_lengths(workload, preset.assumptions, seed=0, step=0).tokens)


def _prompts(each: Evaluation, folder: Path) -> int | None:
    """Return how many prompts it has; None: not known before they are loaded."""
    match each:
        case EvaluationGym():
            return min(each.size, each.prompts or each.size)
        case EvaluationFile(prompts=None):
            file = folder / each.source
            if file.suffix == ".parquet" or not file.is_file():
                return None
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        case EvaluationDataset(prompts=None):
            return None
    return each.prompts
