"""What a run has measured, handed on to the next run of the same model, machines and workload.

A run that begins with a prior plans its first seeding window, its fleet and the order of its offers as one
that has trained some steps already. Each of its own steps outweighs the prior from then on, by the rules that
let a step outweigh the steps before it. Without a prior the first step has the job's initial window and as
many machines as the reserved node has engines.

Lengths are those of the first steps, not of the last: the next run begins at the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A step's rollout after its seeding window. Times in seconds."""

    left: float
    """Tokens per spot instance that were left when the window closed."""
    seconds: float
    """From the closing to the last response."""
    whole_s: float
    """From the step's begin to the last response."""
    num_spot: float
    """Spot instances from the closing on."""


@dataclass(frozen=True, slots=True)
class WindowPrior:
    """What the rule for the seeding window has learned (`window.predicted`, which explains each). Seconds."""

    t_seed_s: float
    n_prem: float | None = None
    train_s_per_token: float | None = None
    busy_s_per_token: float | None = None
    slower: float | None = None
    step_tokens: float = 0.0
    start_s: float = 0.0
    wake_s: float = 0.0
    sleep_s: float = 0.0
    handover_s: float = 0.0
    finish_s: float = 0.0
    tokens_per_s: float | None = None
    """Of one busy spot instance."""
    rollouts: tuple[FinishedRollout, ...] = ()


@dataclass(frozen=True, slots=True)
class EnginePrior:
    """One kind of engine, and its decode step as a straight line of the KV tokens that it reads."""

    kv_tokens: int
    max_running: int
    kv_token_s: float
    """Seconds per KV token."""
    empty_s: float
    """Seconds without any."""


@dataclass(frozen=True, slots=True)
class GpuPrior:
    """A full engine on one kind of GPU."""

    gpu: str
    tokens_per_s: float
    bandwidth: float
    """Of the engine's memory, as `token_cost.MachineKind.engine_bandwidth`."""


@dataclass(frozen=True, slots=True)
class Prior:
    """All that a run hands on."""

    num_steps: int
    """Trained steps that it rests on."""
    window: WindowPrior
    lengths: tuple[int, ...] = ()
    """Tokens of the responses of the first steps."""
    engines: tuple[EnginePrior, ...] = ()
    gpus: tuple[GpuPrior, ...] = ()
    step_s: float | None = None
    """Seconds of a step."""
    version_bytes: int = 0
    """Of a weight version as instances pull it."""
    whole_bytes: int = 0
    """Of a whole weight version."""

    def problem(self) -> str | None:
        """Return what is wrong with it, None if it can be begun with: all numbers finite and not negative."""
        return next((f"{name} is {value}" for name, value in _numbers(self) if not _is_sane(value)), None)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    if is_dataclass(value):
        for each in fields(value):
            yield from _numbers(getattr(value, each.name), each.name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, int | float):
        yield name, value


def _is_sane(value: float) -> bool:
    return math.isfinite(value) and value >= 0
