"""How many spot instances, and so machines, are worth having: by N_prem of the paper's Algorithm 1, or by the
most tokens per dollar where rates and prices are known (`marginal`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlboost_runtime.core.base.cost_model import StepRates, cheapest_machines
from rlboost_runtime.core.base.messages import CoreConfig
from rlboost_runtime.core.base.scheduling_policy import SizeRule

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

    `SizeRule.MARGINAL`: on the machines that give the most tokens per dollar; by N_prem while prices or rates
    are not known. Never 0 unless the job forbids spot instances, like `useful_instances`.
    """
    useful = useful_instances(n_prem, config)
    if config.policy.sizing is not SizeRule.MARGINAL or rates is None or not config.prices.is_known:
        return useful
    per_machine = max(1, config.instances_per_machine)
    most = desired_machines(config.max_spot_instances, config)
    machines = cheapest_machines(rates, config.prices, most, per_machine, weight_bytes)
    return min(config.max_spot_instances, max(1, machines) * per_machine)


def desired_machines(useful: int, config: CoreConfig) -> int:
    """Return the machines that hold `useful` instances; the last one may stay partly unneeded."""
    return -(-useful // max(1, config.instances_per_machine))


@dataclass(slots=True)
class SurplusWatch:
    """Ends machines only after several steps agree that they are superfluous."""

    num_steps: int = 0

    def after_step(self, num_machines: int, desired: int) -> int:
        """Take in a step; return how many machines to end now."""
        surplus = num_machines - desired
        self.num_steps = self.num_steps + 1 if surplus > 0 else 0
        if self.num_steps < STEPS_BEFORE_SHRINKING:
            return 0
        self.num_steps = 0
        return surplus
