"""What moving weights costs: bytes that a machine received, at the price of its offer, into the ledger.

Peers are in the machine's own zone and cost nothing; what comes from a bucket is taken to cost what it costs
from the head: the job says no other price. Guarantee: every byte is billed once, in whole micro-dollars, the
rest carried over to the machine's next pull.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from rlboost_runtime.coordinator.accounts import UsageKind
from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.seams import Clock

GB = 10**9


class EgressMeter:
    """Bills bytes. `price_of`: micro-dollars per GB from the head to a machine; `zone_of`: where it is."""

    def __init__(
        self, ledger: Ledger, clock: Clock, price_of: Callable[[str], int], zone_of: Callable[[str], str]
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._price_of = price_of
        self._zone_of = zone_of
        self._owed: dict[str, Fraction] = {}
        self.by_route: dict[str, float] = {}
        """USD since this coordinator began, by "SOURCE -> ZONE"."""

    def moved(self, machine: str, source: str, num_bytes: int) -> None:
        """Bill `num_bytes` that came to `machine` from "head", "bucket" or "peers"."""
        price = 0 if source == "peers" else self._price_of(machine)
        if price == 0 or num_bytes == 0:
            return
        owed = self._owed.get(machine, Fraction(0)) + Fraction(num_bytes * price, GB)
        due = int(owed)
        self._owed[machine] = owed - due
        if due == 0:
            return
        zone = self._zone_of(machine)
        basis = f"weights, {source} -> {zone}: {num_bytes} bytes at ${price / 1e6:g} per GB"
        self._ledger.add_usage(UsageKind.EGRESS, due, basis, self._clock.wall())
        route = f"{source} -> {zone}"
        self.by_route[route] = self.by_route.get(route, 0.0) + due / 1e6
