"""A bought machine from its offer to its bill: one record, and how what a provider reports changes it.

The same for spot machines, which the coordinator buys into its ledger, and for heads, which the command line
buys into the run's folder. Pure: the caller asks the provider and passes the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rlboost_providers.base.provider import MachineView, Offer
from rlboost_providers.base.traits import provider_traits
from rlboost_runtime.core.base.messages import Pool


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """One machine as it was bought. Times in seconds since the Unix epoch, kept to the microsecond; prices in
    micro-dollars per hour."""

    machine: str
    """Our id of it, and the client token by which its cloud recognises a repeated launch."""
    provider: str
    zone: str
    accelerator: str
    price_micro_usd_per_hour: int
    price_source: str
    intended_at: float
    launched_at: float | None = None
    ended_at: float | None = None
    """When its cloud reported it gone; None: it may cost money."""
    detail: str = ""
    storage_micro_usd_per_hour: int = 0
    """Price of its disk and public address, billed beside the machine."""
    pool: str = Pool.SPOT
    min_billed_s: int | None = None
    """Shortest time that it is billed for; None: recorded by a version that went by the provider alone."""

    @classmethod
    def of(cls, machine: str, offer: Offer, intended_at: float) -> Self:
        """Return the intent to buy `machine` at the most that the offer may cost: its cloud may yet choose a
        cheaper zone."""
        return cls(
            machine=machine,
            provider=offer.provider,
            zone=offer.zone,
            accelerator=offer.accelerator,
            price_micro_usd_per_hour=offer.most_micro_usd_per_hour,
            price_source=offer.source,
            intended_at=intended_at,
            storage_micro_usd_per_hour=offer.storage_micro_usd_per_hour,
            min_billed_s=offer.min_billed_s,
        )

    @property
    def min_billed_ns(self) -> int:
        """Shortest time that it is billed for, in nanoseconds."""
        recorded = self.min_billed_s
        seconds = provider_traits(self.provider).min_billed_s if recorded is None else recorded
        return seconds * 1_000_000_000

    @property
    def all_micro_usd_per_hour(self) -> int:
        """The price including storage."""
        return self.price_micro_usd_per_hour + self.storage_micro_usd_per_hour

    def launched(self, view: MachineView, now: float) -> Self:
        """Return the record of a machine that exists: its zone, and its start by the provider's clock, else
        as recorded before, else now."""
        started_at = self.launched_at if view.started_at is None else view.started_at
        return replace(
            self, zone=view.zone or self.zone, launched_at=now if started_at is None else started_at
        )

    def may_be_unlisted(self, now: float, lag_s: float) -> bool:
        """Return True if the machine may exist although its cloud, whose lists lag by `lag_s`, lacks it."""
        asked_at = self.intended_at if self.launched_at is None else self.launched_at
        return now - asked_at < lag_s


def start_of(view: MachineView, now: float) -> float:
    """Return when the provider started the machine; now, where it does not report that."""
    return now if view.started_at is None else view.started_at


def end_of(view: MachineView | None, now: float) -> float:
    """Return when the machine ended by the provider's clock; now, where it does not report that."""
    return now if view is None or view.ended_at is None else view.ended_at


def price_paid(offer: Offer, view: MachineView) -> int | None:
    """Return the hourly price now, at most the bid, which caps what a cloud charges; None: not reported."""
    price, bid = view.price_micro_usd_per_hour, offer.max_price_micro_usd_per_hour
    return price if price is None or bid is None else min(price, bid)
