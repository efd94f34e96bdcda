"""Which rules a core follows: what distinguishes RLBoost from the paper, the published code and plain
baselines.

A `Policy` is part of `CoreConfig`, so a live run and a simulated one under the same policy decide with the
same code, and a log of events says under which rules it came about.
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
    CLOSED = "closed"
    """Not at all while any spot instance is there: the ablation without seeding."""


class SizeRule(StrEnum):
    """How many spot instances are wanted."""

    N_PREM = "n_prem"
    """N_prem of Algorithm 1, at most the job's cap; the cap until a step has taught it."""
    N_PREM_FROM_RESERVED = "n_prem_from_reserved"
    """The same, beginning with the number of reserved engines, as in the paper."""
    CAP = "cap"
    """Always the job's cap: the published code leaves it to the user."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One set of rules. The default is what live runs follow.

    `keeps_tokens=False` and `DispatchRule.PACED` make `Assign.keep_tokens` less than what there is, which
    only simulated agents obey: they are baselines to compare with.
    """

    name: str = "rlboost"
    dispatch: DispatchRule = DispatchRule.BOOKED
    max_pending: int = 8
    """Theta of Algorithm 2, in responses; the paper gives no value."""
    window: WindowRule = WindowRule.ALGORITHM_1
    has_memory: bool = True
    """After churn, jump to the window remembered for the new number of spot instances."""
    remembered_windows: tuple[tuple[int, float], ...] = ()
    """The memory's content at the start: (spot instances, window in seconds)."""
    sizing: SizeRule = SizeRule.N_PREM
    balances: bool = True
    """Move responses between instances while these run (CONTINUOUSLB of Algorithm 2)."""
    keeps_tokens: bool = True
    """What a lost instance generated is kept; else its responses begin anew."""
    loads_any_time: bool = True
    """An instance that comes in the middle of a step loads the weights at once; else with the next
    version."""


RLBOOST = Policy()
PAPER = Policy(
    name="paper",
    dispatch=DispatchRule.PENDING,
    sizing=SizeRule.N_PREM_FROM_RESERVED,
)
RECOMPUTE = replace(PAPER, name="recompute", keeps_tokens=False)
POLYRL = Policy(
    name="polyrl",
    dispatch=DispatchRule.PACED,
    window=WindowRule.PUBLISHED_CODE,
    sizing=SizeRule.CAP,
    balances=False,
)
ON_DEMAND = Policy(name="on_demand", dispatch=DispatchRule.DEALT, balances=False)
POLICIES = {policy.name: policy for policy in (ON_DEMAND, RECOMPUTE, POLYRL, PAPER, RLBOOST)}
