"""Which failures a run lives through, and what they cost in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from rlboost_runtime.sim.presets import Preset

KINDS = ("trainer", "machine", "coordinator")
"""A process of the trainer or of the coordinator is killed, a spot machine is taken without notice."""
WARM_UP_STEPS = 4
"""Not counted: the first step waits for machines to boot, and the window settles. Nothing fails in them."""
DISK_BYTES_PER_S = 2e9
"""Assumed: at which a checkpoint is read."""
START_S = 30.0
"""Assumed: until a trainer's process has its libraries, its process group and its model's structure."""
STATE_BYTES = 12
"""Of a parameter in a checkpoint: its fp32 master copy and Adam's two moments."""
COORDINATOR_BACK_S = 3.15
"""Measured: p99 of 50 kills until tokens flow again (`benchmarks/restarts`)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure. `at`: when in its step, as a share of a step's mean time without failures."""

    step: int
    at: float
    kind: str


def failures(steps: int, probability: float, seed: int) -> list[Failure]:
    """Return `probability` x `steps` failures, at most one for a step; the kinds take turns.

    So many are drawn, rather than each step by itself, so that runs of few steps have the share that they
    stand for.
    """
    random = Random(f"ettr/{seed}/{probability}")
    chosen = sorted(random.sample(range(WARM_UP_STEPS, WARM_UP_STEPS + steps), round(probability * steps)))
    kinds = [KINDS[i % len(KINDS)] for i in range(len(chosen))]
    random.shuffle(kinds)
    return [Failure(step, random.random(), kind) for step, kind in zip(chosen, kinds, strict=True)]


def restore_s(preset: Preset) -> float:
    """Return the seconds until a trainer that is started again has what its checkpoint holds (assumed)."""
    return START_S + STATE_BYTES * preset.model.parameters / DISK_BYTES_PER_S


def restart_all_s(preset: Preset, step_s: float, planned: list[Failure]) -> float:
    """Return the seconds that the failures would cost a job that starts over from its checkpoint with each of
    them: what it had of the step, and restoring the trainer; engines start meanwhile. Computed, not
    simulated."""
    return sum(failure.at * step_s + restore_s(preset) for failure in planned)
