"""The seeding window's length and the useful number of spot instances: the paper's Algorithm 1 (section 4.1).

After each step::

    T_seed <- T_seed + (t_train_wait - t_remote_wait) / eta
    N_prem <- (t_remote * n_prem + T_seed * N_resv) / t_train
    if n_prem = n_hat:    M[n_hat] <- T_seed       (no churn in the step: remember the window)
    if n_hat in M:        T_seed <- M[n_hat]       (after churn: jump to the remembered window)

A waiting trainer lengthens the window, waiting spot instances shorten it. Departures, none of which changes
the algorithm where it applies: times are float seconds and T_seed never falls below 0; a step without any
spot instance teaches nothing (its window stayed open until the end, whatever T_seed says); N_prem is None
until a step has taught it, where the paper starts with N_resv, so that a first step is not starved (`sizing`
uses the job's cap then).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost_runtime.core.base.cost_model import StepRates
from rlboost_runtime.core.state.responses import StepResponses

SAME_COUNT = 1e-6
"""A time average this close to a whole number of instances had no churn; far above the rounding of a mean."""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What a trained step showed; times in seconds."""

    n_prem: float
    """Time average of spot instances during the step."""
    n_hat: int
    """Spot instances just before the next step."""
    t_train_wait: float
    """Trainer's time waiting for responses."""
    t_remote_wait: float
    """From the last response to the end of the step."""
    t_train: float
    """Trainer's time without waiting."""
    t_remote: float
    """From the start of the step to the last response."""
    num_tokens: int = 0
    """Response tokens of the step."""
    ended_at: float = 0.0
    """When the step was trained."""
    t_handover: float = 0.0
    """Trainer's time to come back onto the GPUs once the reserved engines had freed them."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An open window at one moment. Times in seconds of the run."""

    now: float
    opened_at: float
    num_spot: int
    """Spot instances that will do what the reserved ones leave."""


@dataclass(slots=True)
class SeedingWindow:
    """T_seed, N_prem and the memory M."""

    t_seed_s: float
    eta: float
    num_reserved: int
    n_prem: float | None = None
    """Instances that make rollout just keep up with training; None until a step has taught it."""
    memory: dict[int, float] = field(default_factory=dict)
    """Window in seconds, by number of spot instances."""
    has_memory: bool = True
    """The remembered windows are used."""
    is_fixed: bool = False
    """The window stays as it is; only N_prem is learned."""

    skips_window: bool = False
    """The open step does without a window as soon as there is a spot instance."""

    def restart(self) -> None:
        """A step begins."""

    def woken(self, after_s: float) -> None:
        """The reserved engines were ready so long after the window opened."""

    def asleep(self, after_s: float) -> None:
        """The reserved engines had freed the GPUs so long after the window closed."""

    def look(self, moment: Moment, book: StepResponses) -> float | None:
        """Look at an open window, which may change `t_seed_s`; return when to look again, None: never."""
        return None

    def close(self, moment: Moment, book: StepResponses) -> None:
        """The window has closed."""

    def rates(self) -> StepRates | None:
        """Return what a step takes, as far as this rule learns it; None: it does not, or not yet."""
        return None

    def learn(self, seen: StepObservation) -> None:
        """Take in one trained step."""
        if seen.n_prem <= 0:
            return
        if not self.is_fixed:
            self.t_seed_s = max(0.0, self.t_seed_s + (seen.t_train_wait - seen.t_remote_wait) / self.eta)
        if seen.t_train > 0:
            work = seen.t_remote * seen.n_prem + self.t_seed_s * self.num_reserved
            self.n_prem = work / seen.t_train
        if abs(seen.n_prem - seen.n_hat) < SAME_COUNT:
            self.memory[seen.n_hat] = self.t_seed_s
        if self.has_memory and not self.is_fixed:
            self.t_seed_s = self.memory.get(seen.n_hat, self.t_seed_s)


@dataclass(slots=True)
class CountMeter:
    """The time average of a count."""

    since: float = 0.0
    count: int = 0
    _at: float = 0.0
    _integral: float = 0.0

    def restart(self, at: float) -> None:
        """Begin a new average at `at` with the present count."""
        self.since = self._at = at
        self._integral = 0.0

    def set(self, count: int, at: float) -> None:
        """The count is `count` from `at` on."""
        self._integral += self.count * (at - self._at)
        self._at = at
        self.count = count

    def mean(self, at: float) -> float:
        """Return the average since the restart; over no time, the present count."""
        if at <= self.since:
            return float(self.count)
        return (self._integral + self.count * (at - self._at)) / (at - self.since)
