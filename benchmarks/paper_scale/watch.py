"""Looks at a living run from outside: memory and CPU of its processes, and what its coordinator says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from rlboost_cli.runs.client import NotAnswering, get_status
from rlboost_runtime.processes import ROLE_TAG, RUN_TAG
from rlboost_runtime.run.folder import RunFolder

LOOK_S = 5.0
WARM_UP_S = 900.0
"""Memory grows while the first steps' tokens come in; what grows after that is what would end a long run."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. CPU in seconds since the process began."""

    at_s: float
    rss_mb: float
    """Of the coordinator."""
    cpu_s: float
    """Of the coordinator."""
    agents_cpu_s: float
    lag_p99_ms: float
    tokens_per_s: float


@dataclass(slots=True)
class Watched:
    """All looks, in order of time."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def growth_mb_per_hour(self) -> float | None:
        """Slope of the coordinator's memory after the warm-up; None: the run was too short."""
        late = [sample for sample in self.samples if sample.at_s >= WARM_UP_S]
        if len(late) < 20 or late[-1].at_s - late[0].at_s < WARM_UP_S / 3.0:
            return None
        slope, _ = np.polyfit([s.at_s for s in late], [s.rss_mb for s in late], 1)
        return float(3600.0 * slope)

    @property
    def lag_p99_ms(self) -> float:
        """The median over the run of the event loop's p99 lag in the last minute."""
        return float(np.median([sample.lag_p99_ms for sample in self.samples] or [0.0]))

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        if len(self.samples) < 2:
            return {}
        first, last = self.samples[0], self.samples[-1]
        seconds = last.at_s - first.at_s
        growth = self.growth_mb_per_hour
        return {
            "coordinator_cores": round((last.cpu_s - first.cpu_s) / seconds, 4),
            "agents_cores": round((last.agents_cpu_s - first.agents_cpu_s) / seconds, 4),
            "coordinator_rss_mb": [[round(s.at_s), round(s.rss_mb, 1)] for s in self.samples[::12]],
            "coordinator_growth_mb_per_hour": None if growth is None else round(growth, 1),
            "loop_lag_p99_ms": {"median": self.lag_p99_ms, "max": max(s.lag_p99_ms for s in self.samples)},
            "tokens_per_s": {
                "mean": round(float(np.mean([s.tokens_per_s for s in self.samples]))),
                "max": round(max(s.tokens_per_s for s in self.samples)),
            },
        }


def watch(run: RunFolder, until: float) -> Watched:
    """Look at the run until `until` (monotonic seconds) or its end."""
    watched, began = Watched(), time.monotonic()
    ended_cpu: dict[int, float] = {}
    while time.monotonic() < until and not run.outcome.exists():
        time.sleep(LOOK_S)
        with contextlib.suppress(NotAnswering):
            status = get_status(run, 5.0)
            sample = _sample(run, time.monotonic() - began, status, ended_cpu)
            if sample is not None:
                watched.samples.append(sample)
    return watched


def _sample(
    run: RunFolder, at_s: float, status: dict[str, Any], agents_cpu: dict[int, float]
) -> Sample | None:
    coordinator: psutil.Process | None = None
    for process, role in _processes(run):
        with contextlib.suppress(psutil.Error):
            if role == "coordinator":
                coordinator = process
            elif "rlboost_runtime.agent" in process.cmdline():
                times = process.cpu_times()
                agents_cpu[process.pid] = times.user + times.system
    if coordinator is None:
        return None
    times = coordinator.cpu_times()
    return Sample(
        at_s,
        coordinator.memory_info().rss / 1e6,
        times.user + times.system,
        sum(agents_cpu.values()),
        float(status["loop_lag_p99_ms"]),
        float(status["tokens_per_s"]),
    )


def _processes(run: RunFolder) -> Iterator[tuple[psutil.Process, str]]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get(RUN_TAG) == str(run.path.absolute()):
                yield process, environment.get(ROLE_TAG, "")
