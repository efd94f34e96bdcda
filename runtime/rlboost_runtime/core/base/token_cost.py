"""What a token of one more spot machine costs: the rank of offers in live runs, plans and simulations.

A machine that is taken away after `life` seconds serves for all but the first `boot` of them. It is paid for
the whole life. It receives one version whole, and then one per step: once per machine, as a delta where that
is smaller. So its tokens cost::

    (price * life + egress * (whole + version * serving / step)) / (serving * tokens_per_s)

where serving = life - boot. What a run has measured (`Measured`) replaces what is assumed before. Tokens per
second are those of full engines on that GPU. Decoding reads weights and cache from memory for each token, so
memory bandwidth gives the ratio to GPUs that the run has not had, and one measurement scales all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

LIFE_S = 5_887.5
"""A spot machine's expected life before any was seen: mean of Bamboo's p3 trace (NSDI 2023)."""
BOOT_S = 300.0
"""Judged: from a launch to the first version served, before any machine has booted."""
STEP_S = 600.0
"""Judged: a step before one was trained; those of the paper's set-ups take 250 to 900 s."""


@dataclass(frozen=True, slots=True)
class MachineKind:
    """What a machine is, beside its price."""

    gpu: str = ""
    engines: int = 1
    engine_bandwidth: float = 1.0
    """Memory bandwidth of one engine's GPUs, in bytes per second."""
    place: str = ""
    """Where machines are taken away alike, and boot alike."""


@dataclass(frozen=True, slots=True)
class PlaceRecord:
    """What machines of one place have shown."""

    machine_s: float = 0.0
    """Time that they were there, together."""
    preemptions: int = 0
    boots: int = 0
    boot_s: float = 0.0
    """Of all boots together."""

    @property
    def life_s(self) -> float:
        """Expected life: one preemption in `LIFE_S` seconds is added to what was seen."""
        return (self.machine_s + LIFE_S) / (self.preemptions + 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run knows by now; without arguments, a run that has not begun."""

    engine_tokens_per_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By GPU: tokens per second of a full engine, and its memory bandwidth in bytes per second."""
    places: Mapping[str, PlaceRecord] = field(default_factory=dict)
    step_s: float | None = None
    version_bytes: float = 0.0
    """Of the version published last, as a machine that has the one before it receives it; 0: not known."""
    whole_bytes: float = 0.0
    """Of a version without the one before it; 0: not known."""

    def tokens_per_s(self, kind: MachineKind) -> float:
        """Return the tokens per second of a full machine; only ratios count while nothing is measured."""
        known = self.engine_tokens_per_s.get(kind.gpu)
        if known is not None:
            return kind.engines * known[0]
        scales = [rate / bandwidth for rate, bandwidth in self.engine_tokens_per_s.values()]
        return kind.engines * kind.engine_bandwidth * (median(scales) if scales else 1.0)

    def boot_s(self, place: str) -> float:
        """Return the mean boot in a place; of all places while none was seen there."""
        here = self.places.get(place)
        if here is not None and here.boots:
            return here.boot_s / here.boots
        seen = [each.boot_s / each.boots for each in self.places.values() if each.boots]
        return fmean(seen) if seen else BOOT_S


def usd_per_token(
    kind: MachineKind, usd_per_hour: float, egress_usd_per_gb: float, measured: Measured
) -> float:
    """Return what a token of such a machine costs, infinite where it is gone before it serves.

    Until tokens per second are measured the unit is arbitrary, but the same for all offers.
    """
    life_s = measured.places.get(kind.place, PlaceRecord()).life_s
    serving_s = life_s - measured.boot_s(kind.place)
    if serving_s <= 0:
        return float("inf")
    whole = measured.whole_bytes or measured.version_bytes
    versions = serving_s / (measured.step_s or STEP_S)
    num_bytes = whole + versions * (measured.version_bytes or whole)
    paid = usd_per_hour * life_s / 3_600.0 + egress_usd_per_gb * num_bytes / 1e9
    return paid / (serving_s * measured.tokens_per_s(kind))
