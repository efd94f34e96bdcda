"""Parts of a policy that an ablation turns off, one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switches:
    """True: the part works as the policy says. A part that a policy does not have cannot be turned on."""

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
