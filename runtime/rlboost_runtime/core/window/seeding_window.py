"""What every rule for the seeding window has in common, and how large the fleet should be.

The rule of live runs is `predicted`; the paper's Algorithm 1 and the published code's are in
`rlboost_runtime.sim.baselines`. All of them learn N_prem as the paper's Algorithm 1 (section 4.1) does::

    N_prem <- (t_remote * n_prem + T_seed * N_resv) / t_train

It is None until a step has taught it, where the paper starts with N_resv, so that a first step is not starved
(the job's cap is used then).

How many spot instances, and so machines, are worth having follows from N_prem or, where rates and prices are
known, from the most tokens per dollar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlboost_runtime.core.base.cost_model import StepRates, cheapest_machines
from rlboost_runtime.core.base.messages import CoreConfig, SizeRule
from rlboost_runtime.core.base.prior import WindowPrior
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
    t_before: float = 0.0
    """From the start of the step until the one before it was trained; above 0 if it was asked for ahead."""
    t_fleet: float | None = None
    """The fleet's time for a step, where several are open at once; None: `t_remote`."""

    @property
    def t_step(self) -> float:
        """From the start of the step, or the end of the one before it if that is later, to its own end."""
        return self.t_remote + self.t_remote_wait - self.t_before


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """An open window as it is now. Times in seconds of the run."""

    now: float
    opened_at: float
    num_spot: int
    """Spot instances that will do what the reserved ones leave."""


@dataclass(slots=True)
class SeedingWindow:
    """A rule for T_seed, the length of the seeding window, which also learns N_prem."""

    t_seed_s: float
    num_reserved: int
    n_prem: float | None = field(default=None, kw_only=True)
    """Instances that make rollout just keep up with training; None until a step has taught it."""
    skips_window: bool = field(default=False, kw_only=True)
    """The open step does without a window as soon as there is a spot instance."""

    def restart(self) -> None:
        """A step begins."""

    def woken(self, after_s: float) -> None:
        """The reserved engines were ready `after_s` after the window opened."""

    def asleep(self, after_s: float) -> None:
        """The reserved engines had freed the GPUs `after_s` after the window closed."""

    def look(self, window: OpenWindow, book: StepResponses) -> float | None:
        """Look at an open window, which may change `t_seed_s`; return when to look again, None: never."""
        return None

    def close(self, window: OpenWindow, book: StepResponses) -> None:
        """The window has closed."""

    def rates(self) -> StepRates | None:
        """Return what a step takes; None if this rule does not learn it, or has not yet."""
        return None

    def learn(self, seen: StepObservation) -> None:
        """Take in one trained step."""
        raise NotImplementedError

    def prior(self) -> WindowPrior:
        """Return what has been learned, for the next run."""
        return WindowPrior(self.t_seed_s, self.n_prem)

    def begin_with(self, prior: WindowPrior) -> None:
        """Begin with what a former run has learned."""
        self.t_seed_s, self.n_prem = prior.t_seed_s, prior.n_prem


def instances_to_keep_up(seen: StepObservation, window_s: float, num_reserved: int) -> float:
    """Return N_prem: the instances with which a rollout, helped by `num_reserved` engines for `window_s`,
    takes as long as training. `seen.t_train` must be above 0."""
    fleet_s = seen.t_remote if seen.t_fleet is None else seen.t_fleet
    return (fleet_s * seen.n_prem + window_s * num_reserved) / seen.t_train


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


STEPS_BEFORE_SHRINKING = 3
"""Steps in a row that must find a machine superfluous before one is ended: a machine costs minutes to get
back."""
ROUNDING = 1e-9
"""Slack, in instances, that keeps a whole number of useful instances from being rounded up to the next."""


def useful_instances(n_prem: float | None, config: CoreConfig) -> int:
    """Return the useful number of spot instances: N_prem rounded up, from 1 to `max_spot_instances`.

    Departures from the paper: while no step has taught N_prem this is `max_spot_instances`, where the paper
    starts with the number of local engines and would starve a first step that could have had more
    (`SizeRule.N_PREM_FROM_RESERVED` does as the paper). And it is
    never 0 unless the job forbids spot instances: without any, no later step could teach that they pay again.
    """
    rule = config.policy.sizing
    if n_prem is None and rule is SizeRule.N_PREM_FROM_RESERVED:
        return min(config.max_spot_instances, max(1, config.reserved_instances))
    if n_prem is None or rule is SizeRule.CAP:
        return config.max_spot_instances
    return min(config.max_spot_instances, max(1, math.ceil(n_prem - ROUNDING)))


def worthwhile_instances(
    n_prem: float | None, rates: StepRates | None, weight_bytes: float, config: CoreConfig
) -> int:
    """Return the spot instances worth having under the run's rule.

    `SizeRule.MARGINAL`: on the machines that give the most tokens per dollar; by N_prem while prices are not
    known. While only rates are not known, it is those of the whole machines that N_prem fills. Before N_prem
    it is as many as the reserved node has engines, at least one per machine that the job allows: all machines
    with several engines each would be several times too many, for three steps until they are ended. Never 0
    unless the job forbids spot instances, like `useful_instances`.
    """
    useful = useful_instances(n_prem, config)
    if config.policy.sizing is not SizeRule.MARGINAL or not config.prices.is_known:
        return useful
    if rates is None:
        wanted = useful
        if n_prem is None:
            wanted = max(config.reserved_instances, desired_machines(config.max_spot_instances, config))
        whole = max(config.instances_per_machine, _whole_machines(wanted, config))
        return min(config.max_spot_instances, whole)
    per_machine = max(1, config.instances_per_machine)
    most = desired_machines(config.max_spot_instances, config)
    machines = cheapest_machines(rates, config.prices, most, per_machine, weight_bytes)
    return min(config.max_spot_instances, max(1, machines) * per_machine)


def _whole_machines(instances: int, config: CoreConfig) -> int:
    """Return the instances of the machines that so many instances fill."""
    return instances - instances % max(1, config.instances_per_machine)


def desired_machines(useful: int, config: CoreConfig) -> int:
    """Return the machines that hold `useful` instances; the last one may stay partly unneeded."""
    return -(-useful // max(1, config.instances_per_machine))


@dataclass(slots=True)
class SurplusWatch:
    """Ends machines only after several steps agree that they are superfluous."""

    num_steps: int = 0

    def after_step(self, surplus: int) -> int:
        """Take in a step after which so many machines were superfluous; return how many to end now."""
        self.num_steps = self.num_steps + 1 if surplus > 0 else 0
        if self.num_steps < STEPS_BEFORE_SHRINKING:
            return 0
        self.num_steps = 0
        return surplus
