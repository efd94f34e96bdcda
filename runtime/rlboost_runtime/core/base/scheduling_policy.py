"""Which rules a core follows: what distinguishes RLBoost from the paper, the published code and plain
baselines.

A `SchedulingPolicy` is part of `CoreConfig`, so a live run and a simulated one under the same policy decide
with the same code, and a log of events says under which rules it came about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class DispatchRule(StrEnum):
    """Which instance gets a waiting response."""

    BOOKED = "booked"
    """The emptiest by booked KV tokens; a response that fits nowhere waits (`dispatch`)."""
    PENDING = "pending"
    """The paper's Algorithm 2: the fewest not yet executed, and fewer than `max_pending` (`dispatch`)."""
    DEALT = "dealt"
    """Whole groups dealt evenly once, as a co-located trainer does with its own engines (`dealing`)."""
    PACED = "paced"
    """The published code: a few whole groups a second, in turn to instances without a queue (`dealing`)."""


class WindowRule(StrEnum):
    """How long the reserved engines roll out at the beginning of a step."""

    ALGORITHM_1 = "algorithm_1"
    """The paper's (`seeding`)."""
    PUBLISHED_CODE = "published_code"
    """Whole seconds, and a memory of the windows at which throughput peaked (`seeding_published`)."""
    PREDICTED = "predicted"
    """Until what is left to roll out takes no longer than training (`seeding_predicted`)."""
    CLOSED = "closed"
    """Not at all while any spot instance is there: the ablation without seeding."""


class SizeRule(StrEnum):
    """How many spot instances are wanted."""

    MARGINAL = "marginal"
    """What gives the most tokens per dollar, weights' egress included; N_prem while that is not known."""
    N_PREM = "n_prem"
    """N_prem of Algorithm 1, at most the job's cap; the cap until a step has taught it."""
    N_PREM_FROM_RESERVED = "n_prem_from_reserved"
    """The same, beginning with the number of reserved engines, as in the paper."""
    CAP = "cap"
    """Always the job's cap: the published code leaves it to the user."""


class BalanceRule(StrEnum):
    """Which running responses move between instances (`balance`)."""

    IDLE = "idle"
    """The paper's: an instance without any takes those of the fullest beyond where its throughput levels
    off."""
    EVEN = "even"
    """From the fullest to the emptiest, where that saves more than it costs."""


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """One set of rules. The default is what live runs follow.

    `keeps_tokens=False` and `DispatchRule.PACED` make `Assign.keep_tokens` less than what there is, which
    only simulated agents obey: they are baselines to compare with.
    """

    name: str = "rlboost"
    dispatch: DispatchRule = DispatchRule.BOOKED
    max_pending: int = 1
    """Theta of Algorithm 2, in responses. The paper gives no value; the published code gives work only to
    instances without a queue."""
    booked_growth_share: float = 0.25
    """Share of a response's expected growth for which KV tokens are booked ahead. Responses on an instance
    are at different points of their growth and end one after the other, so they never need all of it
    together. With 0.5 a fifth of an engine's cache is left empty (up to 3 % slower in simulation), with 0 it
    overflows."""
    least_first: bool = True
    """Of waiting responses the one with the fewest tokens is placed first; else the one with the most. In
    simulation 1 to 2 % faster where the trainer takes single responses, up to 0.7 % slower where it waits for
    whole groups, as the live one does."""
    fills_fairly: bool = True
    """`DispatchRule.BOOKED`: at a step's begin nobody is filled more than all will be once all are there."""
    window: WindowRule = WindowRule.PREDICTED
    has_gate: bool = True
    """`WindowRule.PREDICTED`: no window where waking the reserved engines costs more than they help."""
    has_memory: bool = True
    """After churn, jump to the window remembered for the new number of spot instances."""
    remembered_windows: tuple[tuple[int, float], ...] = ()
    """The memory's content at the start: (spot instances, window in seconds)."""
    sizing: SizeRule = SizeRule.MARGINAL
    balances: bool = True
    """Move responses between instances while these run (CONTINUOUSLB of Algorithm 2)."""
    balance: BalanceRule = BalanceRule.EVEN
    keeps_tokens: bool = True
    """What a lost instance generated is kept; else its responses begin anew."""
    loads_any_time: bool = True
    """An instance that comes in the middle of a step loads the weights at once; else with the next
    version."""


RLBOOST = SchedulingPolicy()
PAPER = SchedulingPolicy(
    name="paper",
    dispatch=DispatchRule.PENDING,
    least_first=False,
    booked_growth_share=0.5,
    window=WindowRule.ALGORITHM_1,
    balance=BalanceRule.IDLE,
    sizing=SizeRule.N_PREM_FROM_RESERVED,
)
RECOMPUTE = replace(PAPER, name="recompute", keeps_tokens=False)
POLYRL = SchedulingPolicy(
    name="polyrl",
    dispatch=DispatchRule.PACED,
    least_first=False,
    window=WindowRule.PUBLISHED_CODE,
    sizing=SizeRule.CAP,
    balances=False,
)
ON_DEMAND = SchedulingPolicy(
    name="on_demand",
    dispatch=DispatchRule.DEALT,
    sizing=SizeRule.N_PREM,
    least_first=False,
    window=WindowRule.ALGORITHM_1,
    balances=False,
)
POLICIES = {policy.name: policy for policy in (ON_DEMAND, RECOMPUTE, POLYRL, PAPER, RLBOOST)}
