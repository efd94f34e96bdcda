"""What SkyPilot's catalogue offers for the entries of a job's `any_of`: one offer per zone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlboost_providers.base.provider import Offer
from rlboost_providers.base.traits import cloud_traits, egress_micro_usd_per_gb
from rlboost_providers.skypilot.traits import NAME
from rlboost_runtime.errors import ConfigError, RLBoostError
from rlboost_runtime.job import CloudOffer
from rlboost_runtime.logs import event
from rlboost_runtime.money import MICRO_USD_PER_USD

log = logging.getLogger(__name__)

FRESH_S = 1800.0
"""SkyPilot's catalogue itself is some hours old; reading it again costs a second of CPU."""
AGAIN_S = 60.0
"""The same where an entry was refused: what is wrong with it may have been put right."""
SOURCE = "SkyPilot catalogue"


class Catalogue:
    """The offers of a job; `ask` is SkyPilot's child. Any thread may ask."""

    def __init__(
        self,
        entries: Sequence[CloudOffer],
        ask: Callable[..., list[dict[str, Any]]],
        kinds: Sequence[bool] = (True,),
        head: str | None = None,
    ) -> None:
        """`kinds`: True: spot machines, of a cloud without any those on demand; False: those on demand.
        `head`: the place of the head, as CLOUD/REGION[/ZONE]; None: in no cloud."""
        self._entries, self._ask, self._kinds, self._head = entries, ask, kinds, head
        self._lock = threading.Lock()
        self._offers: list[Offer] = []
        self._entry_of: dict[tuple[str, str, str], CloudOffer] = {}
        self._fresh_until = float("-inf")

    def offers(self) -> list[Offer]:
        """Return them cheapest first; a place that several entries name comes once, from the first.

        An entry that is refused is left out; raises why where no other offers anything.
        """
        with self._lock:
            if time.monotonic() > self._fresh_until:
                found: dict[tuple[str, str, str], Offer] = {}
                problems: list[RLBoostError] = []
                for entry in self._entries:
                    try:
                        offers = self._of(entry)
                    except RLBoostError as problem:
                        event(log, "provider.offers_failed", provider=entry.infra, problem=problem.problem)
                        problems.append(problem)
                        continue
                    for offer in offers:
                        if found.setdefault(offer.place, offer) is offer:
                            self._entry_of[offer.place] = entry
                if problems and not found:
                    raise problems[0]
                self._offers = sorted(found.values(), key=lambda offer: offer.price_micro_usd_per_hour)
                self._fresh_until = time.monotonic() + (AGAIN_S if problems else FRESH_S)
            return list(self._offers)

    def entry_of(self, offer: Offer) -> CloudOffer:
        """Return the job's entry that `offer` comes from. Raises `ConfigError`."""
        self.offers()
        entry = self._entry_of.get(offer.place)
        if entry is None:
            raise ConfigError(f"no entry of any_of leads to {offer.zone}", "launch something from the offers")
        return entry

    def _of(self, entry: CloudOffer) -> list[Offer]:
        most = entry.max_price_usd_per_hour
        return [
            _offer(entry, place, spot, self._head)
            for spot in self._kinds
            for place in self._ask(
                infra=entry.infra,
                accelerators=entry.accelerators,
                instance_type=entry.instance_type,
                spot=spot,
            )
            if most is None or place["usd_per_hour"] <= most
        ]


def _offer(entry: CloudOffer, place: dict[str, Any], asked_for_spot: bool, head: str | None) -> Offer:
    traits = cloud_traits(place["cloud"])
    zone = "/".join(part for part in (place["cloud"], place["region"], place["zone"]) if part)
    return Offer(
        provider=NAME,
        zone=zone,
        accelerator=entry.accelerators,
        price_micro_usd_per_hour=round(place["usd_per_hour"] * MICRO_USD_PER_USD),
        spot=place["spot"],
        source=SOURCE,
        instance_type=place["instance_type"],
        egress_micro_usd_per_gb=egress_micro_usd_per_gb(head, zone, entry.egress_usd_per_gb),
        storage_micro_usd_per_hour=traits.storage_micro_usd_per_hour(entry.disk_gb, spot=place["spot"]),
        min_billed_s=traits.min_billed_s,
        has_spot_market=place["spot"] or not asked_for_spot,
    )
