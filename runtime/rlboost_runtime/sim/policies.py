"""The policies that a simulation can run under: the rules that they name, and what else differs with them.

`Switches` are the parts of a policy that an ablation turns off, one by one. The baselines' rules are in
`sim.baselines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlboost_runtime.core.base.cost_model import Prices
from rlboost_runtime.core.base.messages import PREDICTED, RLBOOST, CoreConfig, SchedulingPolicy, SizeRule
from rlboost_runtime.core.rules import LIVE_RULES, Rules, WindowFactory
from rlboost_runtime.core.window.seeding_window import SeedingWindow
from rlboost_runtime.sim.agents import BEAT_S
from rlboost_runtime.sim.baselines.dispatch import (
    DealtDispatcher,
    IdleBalancer,
    PacedDispatcher,
    PendingDispatcher,
)
from rlboost_runtime.sim.baselines.windows import Algorithm1Window, ClosedWindow, PublishedWindow
from rlboost_runtime.sim.presets import Preset

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

SINGLE = replace(
    RLBOOST,
    nearest_group_first=False,
    yields=False,
    fill_limit=1.0,
)
"""`rlboost` for a trainer that takes single responses: without the rules about groups."""
PAPER = replace(
    SINGLE,
    name="paper",
    fits_small_caches=False,
    dispatch=PENDING,
    least_first=False,
    booked_growth_share=0.5,
    window=ALGORITHM_1,
    balance=IDLE,
    sizing=SizeRule.N_PREM_FROM_RESERVED,
)
RECOMPUTE = replace(PAPER, name="recompute", keeps_tokens=False)
POLYRL = replace(
    SINGLE,
    name="polyrl",
    fits_small_caches=False,
    dispatch=PACED,
    least_first=False,
    window=PUBLISHED_CODE,
    sizing=SizeRule.CAP,
    balances=False,
)
ON_DEMAND = replace(
    SINGLE,
    name="on_demand",
    fits_small_caches=False,
    dispatch=DEALT,
    sizing=SizeRule.N_PREM,
    least_first=False,
    window=ALGORITHM_1,
    balances=False,
)
CORE_POLICIES = {policy.name: policy for policy in (ON_DEMAND, RECOMPUTE, POLYRL, PAPER, RLBOOST)}


@dataclass(frozen=True, slots=True)
class Switches:
    """True: the part works as in the policy. A part that a policy does not have cannot be turned on."""

    seeding: bool = True
    """Reserved engines roll out at the beginning of each step."""
    memory: bool = True
    """The window remembered for a number of spot instances is used again after churn."""
    migration: bool = True
    """What a lost machine generated is kept."""
    pull: bool = True
    """Instances fetch weights whenever they come; otherwise newcomers wait for the next version."""
    balancing: bool = True
    """Responses are moved between instances while these run."""
    prediction: bool = True
    """The window is predicted; else by Algorithm 1."""
    gate: bool = True
    """The window is skipped where it costs more than it helps."""
    evening: bool = True
    """Running responses move until loads are even; else only to idle instances."""
    fair_fill: bool = True
    """At a step's begin the first instance ready leaves work for the others."""
    least_first: bool = True
    """Of waiting responses the one that got least far is placed first."""
    nearest_group_first: bool = True
    """Before that, those of groups with the fewest unfinished ones."""
    yields: bool = True
    """Running responses give way to those of nearer groups."""
    fill_limit: bool = True
    """Engines are not filled entirely, so that groups end sooner."""
    early_passes: bool = True
    """A trainer that waits for groups computes log-probabilities of responses that need none."""


ORACLE = "oracle"
"""Not a policy of the core but a bound that none can beat (`oracle`)."""
POLICIES = (*CORE_POLICIES, ORACLE)
WITHOUT_TURNS = (POLYRL.name, ORACLE)
"""What a step of episodes cannot be simulated under: one deals out whole groups, one knows no turns."""

LEASE_BEATS = 3
"""Heartbeats that a lease lasts, as in live runs."""
PUBLISHED_WINDOWS = {
    "Qwen3-8B": {1: 190.0, 2: 160.0, 3: 105.0, 4: 70.0},
    "Qwen3-14B": {1: 346.0, 2: 212.0, 3: 145.0, 4: 60.0, 5: 8.0, 6: 5.0},
}
"""The windows that the published code ships with, by model: instances, seconds."""
FP32_WIRE_SHARE = 2.0
"""The published code sends weights in fp32."""


@dataclass(frozen=True, slots=True)
class PolicySetup:
    """A policy ready to run."""

    config: CoreConfig
    rules: Rules
    wire_share: float
    """Bytes on the wire over the weights' bytes."""
    works_early: bool
    """The trainer computes what it can before groups are complete, as ours does and the paper's does not."""


def policy_setup(name: str, preset: Preset, switches: Switches) -> PolicySetup:
    """Return how to run a policy on a preset. Raises `ValueError` for an unknown name, and for one that has
    no turns where the preset has."""
    if preset.workload.turns is not None and name in WITHOUT_TURNS:
        raise ValueError(f"{name} has no turns; leave it out")
    known = CORE_POLICIES.get(name)
    if known is None:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    if known is RLBOOST and not preset.assumptions.trains_whole_groups:
        known = SINGLE
    is_published = name == POLYRL.name
    memory = PUBLISHED_WINDOWS.get(preset.model.name) if is_published else None
    rules = baseline_rules(memory, has_memory=switches.memory)
    best = preset.best_spot
    config = CoreConfig(
        max_spot_instances=0 if name == ON_DEMAND.name else preset.max_spot_instances,
        instances_per_machine=best.engines,
        reserved_instances=preset.reserved_engines,
        lease_s=LEASE_BEATS * BEAT_S,
        seeding_initial_s=preset.seeding_initial_s,
        prices=Prices(preset.reserved_usd_per_hour, best.usd_per_hour, preset.egress_of(best)),
        policy=_without(known, switches),
    )
    wire_share = FP32_WIRE_SHARE if is_published else preset.assumptions.wire_share
    works_early = name == RLBOOST.name and switches.early_passes and not preset.workload.turns
    return PolicySetup(config, rules, wire_share, works_early)


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

    windows: dict[str, WindowFactory] = {
        ALGORITHM_1: lambda config, *_: remembering(Algorithm1Window, config),
        PUBLISHED_CODE: lambda config, *_: remembering(PublishedWindow, config),
        CLOSED: lambda config, *_: ClosedWindow(0.0, config.reserved_instances),
    }
    return Rules(
        {**LIVE_RULES.dispatch, PENDING: PendingDispatcher, DEALT: DealtDispatcher, PACED: PacedDispatcher},
        {**LIVE_RULES.balance, IDLE: IdleBalancer},
        {**LIVE_RULES.windows, **windows},
    )


def _without(policy: SchedulingPolicy, switches: Switches) -> SchedulingPolicy:
    return replace(
        policy,
        window=_window(policy.window, switches),
        keeps_tokens=policy.keeps_tokens and switches.migration,
        loads_any_time=policy.loads_any_time and switches.pull,
        balances=policy.balances and switches.balancing,
        has_gate=policy.has_gate and switches.gate,
        balance=policy.balance if switches.evening else IDLE,
        fills_fairly=policy.fills_fairly and switches.fair_fill,
        least_first=policy.least_first and switches.least_first,
        nearest_group_first=policy.nearest_group_first and switches.nearest_group_first,
        yields=policy.yields and switches.yields,
        fill_limit=policy.fill_limit if switches.fill_limit else 1.0,
    )


def _window(rule: str, switches: Switches) -> str:
    if not switches.seeding:
        return CLOSED
    if rule == PREDICTED and not switches.prediction:
        return ALGORITHM_1
    return rule
