"""The policies that a simulation can run under, and the rules that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlboost_runtime.core.base.messages import CoreConfig
from rlboost_runtime.core.base.scheduling_policy import RLBOOST, SchedulingPolicy, SizeRule
from rlboost_runtime.core.rules import LIVE_RULES, Rules
from rlboost_runtime.core.state.rates import GenerationRate, Lengths, StepTimes
from rlboost_runtime.core.window.seeding_window import SeedingWindow
from rlboost_runtime.sim.baselines.balance import IdleBalancer
from rlboost_runtime.sim.baselines.dispatch import DealtDispatcher, PacedDispatcher, PendingDispatcher
from rlboost_runtime.sim.baselines.windows import Algorithm1Window, ClosedWindow, PublishedWindow

PENDING = "pending"
"""Dispatch by the paper's Algorithm 2: the fewest not yet executed, and fewer than `max_pending`."""
DEALT = "dealt"
"""Whole groups dealt evenly once, as a co-located trainer does with its own engines."""
PACED = "paced"
"""The published code: a few whole groups a second, in turn to instances without a queue."""
IDLE = "idle"
"""The paper's balance: an idle instance takes running responses of the busiest."""
ALGORITHM_1 = "algorithm_1"
"""The paper's window."""
PUBLISHED_CODE = "published_code"
"""Whole seconds, and a memory of the windows at which throughput peaked."""
CLOSED = "closed"
"""No window while any spot instance is there: the ablation without seeding."""

PAPER = SchedulingPolicy(
    name="paper",
    dispatch=PENDING,
    least_first=False,
    booked_growth_share=0.5,
    window=ALGORITHM_1,
    balance=IDLE,
    sizing=SizeRule.N_PREM_FROM_RESERVED,
)
RECOMPUTE = replace(PAPER, name="recompute", keeps_tokens=False)
POLYRL = SchedulingPolicy(
    name="polyrl",
    dispatch=PACED,
    least_first=False,
    window=PUBLISHED_CODE,
    sizing=SizeRule.CAP,
    balances=False,
)
ON_DEMAND = SchedulingPolicy(
    name="on_demand",
    dispatch=DEALT,
    sizing=SizeRule.N_PREM,
    least_first=False,
    window=ALGORITHM_1,
    balances=False,
)
BASELINES = {policy.name: policy for policy in (ON_DEMAND, RECOMPUTE, POLYRL, PAPER)}
POLICIES = {**BASELINES, RLBOOST.name: RLBOOST}


def baseline_rules(memory: Mapping[int, float] | None = None, *, has_memory: bool = True) -> Rules:
    """Return the rules of live runs and of all baselines.

    `memory`: the windows in seconds that a rule with a memory remembers at the start, by number of spot
    instances. `has_memory`: after churn it jumps to the window remembered for the new number.
    """

    def remembering(kind: type[Algorithm1Window], config: CoreConfig) -> SeedingWindow:
        return kind(
            config.seeding_initial_s,
            config.reserved_instances,
            config.seeding_eta,
            memory=dict(memory or {}),
            has_memory=has_memory,
        )

    def algorithm_1(config: CoreConfig, _: Lengths, __: GenerationRate, ___: StepTimes) -> SeedingWindow:
        return remembering(Algorithm1Window, config)

    def published(config: CoreConfig, _: Lengths, __: GenerationRate, ___: StepTimes) -> SeedingWindow:
        return remembering(PublishedWindow, config)

    def closed(config: CoreConfig, _: Lengths, __: GenerationRate, ___: StepTimes) -> SeedingWindow:
        return ClosedWindow(0.0, config.reserved_instances)

    return Rules(
        {**LIVE_RULES.dispatch, PENDING: PendingDispatcher, DEALT: DealtDispatcher, PACED: PacedDispatcher},
        {**LIVE_RULES.balance, IDLE: IdleBalancer},
        {**LIVE_RULES.windows, ALGORITHM_1: algorithm_1, PUBLISHED_CODE: published, CLOSED: closed},
    )
