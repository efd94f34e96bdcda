"""How many spot machines give the most tokens per dollar: as long as one more saves more than it costs.

A step's responses take E engines R(E) seconds::

    R(E) = shared / E + max(chain, steps / E)

`shared`: engine-seconds that come to the same however responses are spread, such as reading their KV caches.
A decode step also takes a time that depends on nothing: the longest response goes through `chain` seconds of
it, and engines whose KV caches are full through `steps` engine-seconds in all. So engines that are less than
full bring less. With n spot instances, p engines on the reserved node, B seconds of training and w seconds to
wake the reserved engines, a step lasts::

    n = 0    w + R(p) + B                    rollout, then training
    n > 0    max(S + B, R(n))                where R(n) is at most B + w: no window is needed
             (S^3 + T^3)^(1/3) + B           else, T = w + R(n + p) (1 - (B + w) / R(n))

T is the window as `window.predicted` runs it, S how long a trainer has nothing to train because nothing is
finished yet. Neither hides the other: a window that S outlasts still brings fewer responses than it should,
and with the greater of the two a fifth machine would seem to be worth nothing and the fourth too much
(simulated, constant fleets of one to eight machines: off by 3 %, the greater by 10 %).
What overlaps with nothing comes on top. A step costs its seconds at the price of the
reserved node and the machines, and for each instance the bytes of one version of the weights: full weights
across clouds can cost more than the machine itself. Tokens per step are given, so the cheapest step is the
cheapest token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOUR_S = 3_600.0
GB = 1e9
SAME_COST = 0.002
"""Relative difference in cost that is none: rates are not known any better, and speed is worth something."""

BOTH = 3.0
"""Exponent that puts together a window and a trainer that is fed late. Chosen on the settings of
`benchmarks.scheduler.fleet_size`."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a run pays. All zero: unknown, or free."""

    reserved_usd_per_hour: float = 0.0
    """Of all reserved nodes."""
    spot_usd_per_hour: float = 0.0
    """Of one spot machine."""
    egress_usd_per_gb: float = 0.0
    """Of a gigabyte from the head to a spot machine."""

    @property
    def is_known(self) -> bool:
        """True if there is anything to weigh: speed is worth money, and so are machines."""
        return self.reserved_usd_per_hour > 0 and (self.spot_usd_per_hour > 0 or self.egress_usd_per_gb > 0)


@dataclass(frozen=True, slots=True)
class StepRates:
    """What a step of this run takes; times in seconds."""

    tokens: float
    """Response tokens of a step."""
    shared_s: float
    """Engine-seconds of the rollout however it is spread."""
    reserved_engines: float
    """Reserved engines, as so many spot instances."""
    train_s: float
    """From the closing of the window to the end, where the trainer never waits."""
    chain_s: float = 0.0
    """Of the rollout, on however many engines."""
    steps_s: float = 0.0
    """Engine-seconds beside `shared_s` where every engine is full."""
    wake_s: float = 0.0
    """Until woken reserved engines serve."""
    start_s: float = 0.0
    """Before a trainer has work, however many engines there are."""
    fixed_s: float = 0.0
    """Of a step that overlaps with nothing."""


def rollout_s(rates: StepRates, engines: float) -> float:
    """Return the seconds that so many engines take to roll out a step, infinite for none."""
    if engines <= 0:
        return float("inf")
    return rates.shared_s / engines + max(rates.chain_s, rates.steps_s / engines)


def step_s(rates: StepRates, instances: int) -> float:
    """Return the seconds of a step with so many spot instances, infinite without any engine."""
    if not instances:
        return rates.wake_s + rollout_s(rates, rates.reserved_engines) + rates.train_s + rates.fixed_s
    window_s = best_window_s(rates, instances)
    late_s = math.pow(rates.start_s**BOTH + window_s**BOTH, 1.0 / BOTH)
    begun_s = late_s + rates.train_s + rates.fixed_s
    return begun_s if window_s else max(begun_s, rollout_s(rates, instances) + rates.fixed_s)


def best_window_s(rates: StepRates, instances: int) -> float:
    """Return how long the reserved engines should roll out beside so many spot instances (at least one)."""
    alone_s = rollout_s(rates, instances)
    if alone_s <= rates.train_s + rates.wake_s or rates.reserved_engines <= 0:
        return 0.0
    together_s = rollout_s(rates, instances + rates.reserved_engines)
    return rates.wake_s + together_s * (1.0 - (rates.train_s + rates.wake_s) / alone_s)


def step_usd(rates: StepRates, prices: Prices, machines: int, per_machine: int, weight_bytes: float) -> float:
    """Return the dollars of a step with so many spot machines; `weight_bytes` go to each, whatever number of
    instances it has."""
    per_hour = prices.reserved_usd_per_hour + machines * prices.spot_usd_per_hour
    egress = machines * weight_bytes / GB * prices.egress_usd_per_gb
    return per_hour * step_s(rates, machines * per_machine) / HOUR_S + egress


def cheapest_machines(
    rates: StepRates, prices: Prices, most: int, per_machine: int, weight_bytes: float
) -> int:
    """Return how many machines, from 0 to `most`, give the most tokens per dollar.

    Of fleets whose tokens cost the same, to `SAME_COST`, it is the fastest, and of those the smallest.
    """
    usd = [step_usd(rates, prices, n, per_machine, weight_bytes) for n in range(most + 1)]
    seconds = [step_s(rates, n * per_machine) for n in range(most + 1)]
    enough = min(usd) * (1.0 + SAME_COST)
    cheap = [n for n in range(most + 1) if usd[n] <= enough]
    return min(cheap, key=lambda n: (seconds[n], n))
