"""Rules of the paper and of plain baselines for the seeding window.

The paper's Algorithm 1 (section 4.1), after each step::

    T_seed <- T_seed + (t_train_wait - t_remote_wait) / eta
    N_prem <- (t_remote * n_prem + T_seed * N_resv) / t_train
    if n_prem = n_hat:    M[n_hat] <- T_seed       (no churn in the step: remember the window)
    if n_hat in M:        T_seed <- M[n_hat]       (after churn: jump to the remembered window)

A waiting trainer lengthens the window, waiting spot instances shorten it. Departures, none of which changes
the algorithm where it applies: times are float seconds and T_seed never falls below 0; a step without any
spot instance teaches nothing (its window stayed open until the end, whatever T_seed is).

The published code (PolyRL, balance.rs, branch `artifact`): whole seconds; a third of the difference of the
idle times each step; never below 5 s after a cut. Its memory is not the paper's: it keeps the window at which
throughput last rose (the peak). When throughput stops rising, the remembered window moves to it by four
fifths; when the number of instances changes, the old number's by one fifth, and the new number's window, if
there is one, is used at once. The code ships with a table of such windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost_runtime.core.window.seeding_window import (
    SAME_COUNT,
    SeedingWindow,
    StepObservation,
    instances_to_keep_up,
)

FLOOR_S = 5.0
"""A cut does not go below this."""
PEAK_WEIGHT = 0.8
"""Weight of the peak in the memory when throughput stops rising."""
CHURN_WEIGHT = 0.2
"""Weight of the peak in the memory of the number of instances that is left behind."""


@dataclass(slots=True)
class Algorithm1Window(SeedingWindow):
    """T_seed, N_prem and the memory M of the paper's Algorithm 1."""

    eta: float
    memory: dict[int, float] = field(default_factory=dict)
    """Window in seconds, by number of spot instances."""
    has_memory: bool = True
    """The remembered windows are used."""

    def learn(self, seen: StepObservation) -> None:
        """Take in one trained step."""
        if seen.n_prem <= 0:
            return
        self.t_seed_s = max(0.0, self.t_seed_s + (seen.t_train_wait - seen.t_remote_wait) / self.eta)
        if seen.t_train > 0:
            self.n_prem = instances_to_keep_up(seen, self.t_seed_s, self.num_reserved)
        if abs(seen.n_prem - seen.n_hat) < SAME_COUNT:
            self.memory[seen.n_hat] = self.t_seed_s
        if self.has_memory:
            self.t_seed_s = self.memory.get(seen.n_hat, self.t_seed_s)


@dataclass(slots=True)
class ClosedWindow(SeedingWindow):
    """No window while there is any spot instance; only N_prem is learned. The ablation without seeding."""

    def __post_init__(self) -> None:
        """Do without a window in every step."""
        self.skips_window = True

    def learn(self, seen: StepObservation) -> None:
        """Take in one trained step."""
        if seen.n_prem > 0 and seen.t_train > 0:
            self.n_prem = instances_to_keep_up(seen, self.t_seed_s, self.num_reserved)


@dataclass(slots=True)
class PublishedWindow(Algorithm1Window):
    """T_seed and memory of the published code; N_prem, which it does not compute, as in Algorithm 1."""

    peak_s: float | None = None
    """The window at which throughput last rose."""
    throughput: float = 0.0
    num_instances: int | None = None
    """Spot instances after the former step."""
    _is_rising: bool = field(default=False)

    def learn(self, seen: StepObservation) -> None:
        """Take in one trained step."""
        if seen.n_prem <= 0:
            return
        self._note_throughput(seen)
        if seen.t_train_wait < seen.t_remote_wait:
            cut = int(seen.t_remote_wait - seen.t_train_wait) // int(self.eta)
            self.t_seed_s = max(FLOOR_S, self.t_seed_s - cut)
        else:
            self.t_seed_s += int(seen.t_train_wait - seen.t_remote_wait) // int(self.eta)
        former, self.num_instances = self.num_instances, seen.n_hat
        if former is not None and former != seen.n_hat:
            self._move(former, CHURN_WEIGHT)
            if self.has_memory:
                self.t_seed_s = float(int(self.memory.get(seen.n_hat, self.t_seed_s)))

    def _note_throughput(self, seen: StepObservation) -> None:
        seconds = seen.t_remote + seen.t_remote_wait
        throughput = seen.num_tokens / seconds if seconds > 0 else 0.0
        if throughput > self.throughput:
            self.peak_s, self._is_rising = self.t_seed_s, True
        elif self._is_rising:
            self._is_rising = False
            self._move(seen.n_hat, PEAK_WEIGHT)
        self.throughput = throughput

    def _move(self, num_instances: int, weight: float) -> None:
        if self.peak_s is not None:
            known = self.memory.get(num_instances, self.peak_s)
            self.memory[num_instances] = (1.0 - weight) * known + weight * self.peak_s
