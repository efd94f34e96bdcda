"""Which rules a core follows: what distinguishes RLBoost from the paper, the published code and plain
baselines.

A `SchedulingPolicy` is part of `CoreConfig`, so a live run and a simulated one under the same policy decide
with the same code, and a log of events records the rules under which it was written. The baselines' policies
are in `rlboost_runtime.sim.baselines`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BOOKED = "booked"
"""Dispatch to the emptiest instance by booked KV tokens; a response that fits nowhere waits (`dispatch`)."""
EVEN = "even"
"""Running responses move from the fullest instance to the emptiest, where that saves more than it costs."""
PREDICTED = "predicted"
"""A window until what is left to roll out takes no longer than training (`window.predicted`)."""


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


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """One set of rules. The default is what live runs follow."""

    name: str = "rlboost"
    dispatch: str = BOOKED
    """Name of the dispatch rule, which `core.rules` maps to an implementation."""
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
    """`BOOKED`: at a step's begin no instance is filled more than all will be once all are there."""
    window: str = PREDICTED
    """Name of the rule for the seeding window."""
    has_gate: bool = True
    """`PREDICTED`: no window where waking the reserved engines costs more than they help."""
    sizing: SizeRule = SizeRule.MARGINAL
    balances: bool = True
    """Move responses between instances while these run (CONTINUOUSLB of Algorithm 2)."""
    balance: str = EVEN
    """Name of the rule by which they move."""
    keeps_tokens: bool = True
    """What a lost instance generated is kept; else its responses begin anew, by `Assign.keep_tokens`, which
    only simulated agents obey."""
    loads_any_time: bool = True
    """An instance that comes in the middle of a step loads the weights at once; else with the next
    version."""


RLBOOST = SchedulingPolicy()
