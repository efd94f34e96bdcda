"""What EC2 spot machines cost now: the latest entry of the price history per zone, kept for a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from rlboost_providers.aws.errors import explained
from rlboost_providers.aws.machines import ec2_client
from rlboost_providers.aws.traits import NAME
from rlboost_providers.base.prices import Quote, ShippedTable
from rlboost_runtime.errors import ProviderError
from rlboost_runtime.money import parse_usd

KEEP_S = 60.0
"""Prices are asked for at most so often: EC2 moves them a few times a day."""
SYSTEM = "Linux/UNIX"


@dataclass(frozen=True, slots=True)
class SpotPrice:
    """The price of one machine type in one zone, in micro-dollars per hour, since `since` (Unix seconds)."""

    instance_type: str
    zone: str
    micro_usd_per_hour: int
    since: float


class SpotPrices:
    """The present spot prices of one region. Any thread may ask."""

    def __init__(self, ec2: Callable[[], Any], region: str) -> None:
        self._ec2 = ec2  # boto3's client of the region, made when it is first needed
        self._region = region
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], tuple[float, tuple[SpotPrice, ...]]] = {}

    def of(self, instance_types: Sequence[str]) -> tuple[SpotPrice, ...]:
        """Return the prices of all zones that sell one of `instance_types` as spot, cheapest first. Raises
        `ProviderError` and its kin where EC2 does not answer and nothing younger than `KEEP_S` is known."""
        key = tuple(sorted(instance_types))
        with self._lock:
            asked_at, prices = self._known.get(key, (float("-inf"), ()))
            if time.monotonic() - asked_at < KEEP_S:
                return prices
            prices = _latest(self._ask(key))
            self._known[key] = (time.monotonic(), prices)
            return prices

    def forget(self) -> None:
        """Ask EC2 the next time."""
        with self._lock:
            self._known.clear()

    def _ask(self, instance_types: tuple[str, ...]) -> list[SpotPrice]:
        with explained(f"read the spot prices of {self._region}"):
            pages = (
                self._ec2()
                .get_paginator("describe_spot_price_history")
                .paginate(
                    InstanceTypes=list(instance_types),
                    ProductDescriptions=[SYSTEM],
                    StartTime=datetime.now(UTC) - timedelta(minutes=5),  # and the last change before that
                )
            )
            rows = [row for page in pages for row in page["SpotPriceHistory"]]
        return [price for row in rows if (price := _price(row)) is not None]


@dataclass(frozen=True, slots=True)
class PriceHistory:
    """EC2's spot prices as a `prices.PriceSource`: of the kinds that `known` (the shipped table) has."""

    prices: Mapping[str, SpotPrices]
    """By region."""
    known: Sequence[Quote]
    """On-demand prices and GPUs of machine types, which the history does not tell."""
    name: str = "EC2's spot price history"
    is_live: bool = True

    def quotes(self) -> list[Quote]:
        """Return a quote per machine type and zone. May block for seconds; raises `ProviderError`."""
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        found = []
        for region, prices in self.prices.items():
            kinds = {q.instance_type: q for q in self.known if q.cloud == "aws" and q.region == region}
            for price in prices.of(sorted(kinds)) if kinds else ():
                kind = kinds[price.instance_type]
                found.append(
                    Quote(
                        cloud="aws",
                        region=region,
                        zone=price.zone,
                        instance_type=price.instance_type,
                        accelerator=kind.accelerator,
                        accelerator_count=kind.accelerator_count,
                        on_demand_usd_per_hour=kind.on_demand_usd_per_hour,
                        spot_usd_per_hour=price.micro_usd_per_hour / 1e6,
                        as_of=today,
                        source=f"{self.name}; on demand: {kind.source}",
                    )
                )
        if not found:
            raise ProviderError(
                "EC2 lists no spot price for these machines", "check that the region has them"
            )
        return found


def _price(row: Mapping[str, Any]) -> SpotPrice | None:
    try:
        micro_usd = parse_usd(row["SpotPrice"])
    except ValueError:
        return None
    if micro_usd <= 0:
        return None
    return SpotPrice(row["InstanceType"], row["AvailabilityZone"], micro_usd, row["Timestamp"].timestamp())


def _latest(prices: Sequence[SpotPrice]) -> tuple[SpotPrice, ...]:
    last: dict[tuple[str, str], SpotPrice] = {}
    for price in sorted(prices, key=lambda p: p.since):
        last[price.instance_type, price.zone] = price
    return tuple(sorted(last.values(), key=lambda p: (p.micro_usd_per_hour, p.zone, p.instance_type)))


class LivePrices:
    """A `PriceSource`: EC2's spot prices of now over the shipped table, which has the other clouds'.

    Costs a request per region that the table knows; nothing is bought, and AWS asks no money for the answer.
    `infra`: as in job files; only regions in it are asked.
    """

    def __init__(self, infra: str | None = None) -> None:
        self._known = ShippedTable().quotes()
        wanted = "" if infra is None else infra.rstrip("/") + "/"
        self._regions = {
            q.region for q in self._known if q.cloud == NAME and f"{NAME}/{q.region}/".startswith(wanted)
        }
        self.is_live = bool(self._regions)
        self.name = "EC2's spot price history" if self._regions else ShippedTable.name

    def quotes(self) -> list[Quote]:
        """Return EC2's spot prices and other clouds' quotes. Raises `ProviderError`, `ConfigError`."""
        if not self._regions:
            return self._known
        others = [quote for quote in self._known if quote.cloud != NAME]
        history = {
            region: SpotPrices(partial(ec2_client, region), region) for region in sorted(self._regions)
        }
        return [*PriceHistory(history, self._known).quotes(), *others]
