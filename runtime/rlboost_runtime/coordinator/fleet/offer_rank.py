"""What tokens of a live offer cost: by what this run has measured, and what goes over the network for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlboost_providers.base.provider import Offer
from rlboost_providers.registry import expected_before, machine_kind
from rlboost_runtime.core.base.token_cost import MachineKind, usd_per_token
from rlboost_runtime.core.core import Core
from rlboost_runtime.job import Job
from rlboost_runtime.money import MICRO_USD_PER_USD


class OfferRank:
    """Ranks the offers of a job for one more machine."""

    def __init__(self, job: Job, core: Callable[[], Core], zone_of: Callable[[str], str]) -> None:
        """`zone_of`: PROVIDER/ZONE of a machine; empty: not known."""
        self._job = job
        self._core = core
        self._zone_of = zone_of
        self._expected = expected_before(job)

    def kind_of(self, offer: Offer) -> MachineKind:
        """Return what the core is told of a machine that was bought as `offer`."""
        return machine_kind(self._job, offer.accelerator, f"{offer.provider}/{offer.zone}")

    def usd_per_token(self, offer: Offer) -> float:
        """Return what a token of one more such machine costs."""
        measured = self._core().measured()
        if not measured.whole_bytes:
            measured = replace(measured, whole_bytes=self._expected.whole_bytes)
        egress = 0 if self._has_peers(offer) else offer.egress_micro_usd_per_gb
        usd_per_hour = offer.all_micro_usd_per_hour / MICRO_USD_PER_USD
        return usd_per_token(self.kind_of(offer), usd_per_hour, egress / MICRO_USD_PER_USD, measured)

    def _has_peers(self, offer: Offer) -> bool:
        """Return True if a machine in the offer's zone already receives versions, and would share them."""
        if not self._job.weights.peers:
            return False
        zone = f"{offer.provider}/{offer.zone}"
        machines = self._core().machines.values()
        return any(m.counts and m.has_joined and self._zone_of(m.machine) == zone for m in machines)
