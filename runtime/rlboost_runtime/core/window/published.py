"""The seeding window as the published code of the paper has it (PolyRL, balance.rs, branch `artifact`).

Whole seconds; a third of the difference of the idle times each step; never below 5 s after a cut. Its
memory is not the paper's: it keeps the window at which throughput last rose (the peak). When throughput
stops rising, the remembered window moves to it by four fifths; when the number of instances changes, the
old number's by one fifth, and the new number's window, if there is one, is used at once. The code ships
with a table of such windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost_runtime.core.window.algorithm_1 import SeedingWindow, StepObservation

FLOOR_S = 5.0
"""A cut does not go below this."""
PEAK_WEIGHT = 0.8
"""Weight of the peak in the memory when throughput stops rising."""
CHURN_WEIGHT = 0.2
"""Weight of the peak in the memory of the number of instances that is left behind."""


@dataclass(slots=True)
class PublishedWindow(SeedingWindow):
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
