"""What GPU machines cost, spot and on demand: quotes, checked before they are used.

Guarantees of a `PriceBook`: every price is positive; no spot price is above its machine's on-demand price;
where zones of a region disagree, the price is their median, and a zone far from it is named in `remarks`, not
used. Nothing is dropped or changed without a remark.

A source is anything with `name` and `quotes()`: the shipped table (`price_table.csv`), so that everything
works offline; catalogues and price histories of clouds are asked before it, each as one more `PriceSource`.
The shipped table knows a few machine types in a few regions, and is as old as its `as_of` says: good for a
plan, not for a bid.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import Protocol

from rlboost_runtime.errors import ConfigError, ProviderError

FAR = 2.0
"""A zone whose spot price is more than so many times the median of its region, or less than the median by as
much, is an outlier. In the shipped table the cheapest zone is within 30 % of the median
in all but one region."""


@dataclass(frozen=True, slots=True)
class Quote:
    """One machine type in one place. Prices in USD per machine-hour; None: not sold so."""

    cloud: str
    region: str
    instance_type: str
    accelerator: str
    accelerator_count: int
    on_demand_usd_per_hour: float | None
    spot_usd_per_hour: float | None
    as_of: str
    """Day on which the source was read, as YYYY-MM-DD."""
    source: str
    zone: str = ""
    """Empty: the price stands for the whole region."""
    num_zones: int = 1
    """Zones that the spot price stands for."""
    spot_min_usd_per_hour: float | None = None
    """Cheapest of those zones, where the source gives a median and a minimum instead of zones."""

    @property
    def place(self) -> str:
        """Cloud and region as a job file writes them, with the zone where there is one."""
        return "/".join(part for part in (self.cloud, self.region, self.zone) if part)

    @property
    def usd_per_gpu_hour(self) -> float:
        """Spot price where it is sold so, else the one on demand, per GPU; a price book's quotes have one."""
        spot, on_demand = self.spot_usd_per_hour, self.on_demand_usd_per_hour
        price = on_demand if spot is None else spot
        assert price is not None  # `_sound` keeps no quote without a price
        return price / self.accelerator_count


class WantedMachine(Protocol):
    """What a job's offer of machines in a cloud says of prices (`rlboost_runtime.job.CloudOffer`)."""

    @property
    def infra(self) -> str:
        """CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE."""

    @property
    def accelerators(self) -> str:
        """NAME:COUNT."""

    @property
    def instance_type(self) -> str | None:
        """The cloud's own name of the machine type; None: any that has the accelerators."""

    @property
    def max_price_usd_per_hour(self) -> float | None:
        """Most that a machine may cost; None: not limited."""


class PriceSource(Protocol):
    """Somebody who knows prices."""

    @property
    def name(self) -> str:
        """For people: what was asked."""

    @property
    def is_live(self) -> bool:
        """True if prices are from now; else they are as old as their `as_of`."""

    def quotes(self) -> list[Quote]:
        """Return everything that the source knows. May block for seconds; raises `ProviderError`."""


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Checked quotes: one per machine type and region, spot price being the zones' median."""

    quotes: tuple[Quote, ...]
    source: str
    is_live: bool
    remarks: tuple[str, ...] = ()
    silent: tuple[ProviderError, ...] = ()
    """Why sources that come first did not answer."""

    def of(self, wanted: WantedMachine) -> tuple[Quote, ...]:
        """Return the quotes that `wanted` stands for, in its region, cheapest first."""
        name, count = parse_accelerator(wanted.accelerators)
        where = "/".join(wanted.infra.split("/")[:2])
        quotes = self.find(accelerator=name, count=count or 1, infra=where)
        return tuple(q for q in quotes if wanted.instance_type in (None, q.instance_type))

    def machine_types(self, wanted: WantedMachine) -> tuple[str, ...]:
        """Return the machine types of `wanted`, the same in every region. Raises `ConfigError`."""
        if wanted.instance_type is not None:
            return (wanted.instance_type,)
        name, count = parse_accelerator(wanted.accelerators)
        cloud = wanted.infra.partition("/")[0]
        found = {q.instance_type for q in self.find(accelerator=name, count=count or 1, infra=cloud)}
        if not found:
            raise ConfigError(
                f"no known {cloud} machine type has {wanted.accelerators}",
                "write instance_type, such as instance_type: p5.48xlarge",
            )
        return tuple(sorted(found))

    def find(
        self, *, accelerator: str | None = None, count: int | None = None, infra: str | None = None
    ) -> tuple[Quote, ...]:
        """Return matching quotes, cheapest first. `infra` is CLOUD or CLOUD/REGION, as in job files."""
        found = (
            quote
            for quote in self.quotes
            if (accelerator is None or quote.accelerator.lower() == accelerator.lower())
            and (count is None or quote.accelerator_count == count)
            and (infra is None or f"{quote.cloud}/{quote.region}/".startswith(infra.rstrip("/") + "/"))
        )
        return tuple(sorted(found, key=lambda each: (each.usd_per_gpu_hour, each.place, each.instance_type)))

    @property
    def accelerators(self) -> tuple[str, ...]:
        """All GPUs that something is known of."""
        return tuple(sorted({quote.accelerator for quote in self.quotes}))


def price_book(sources: Sequence[PriceSource]) -> PriceBook:
    """Return the checked prices of the first of `sources` that answers; say which ones did not. Raises the
    last one's `ProviderError` where none does."""
    silent: list[ProviderError] = []
    for number, source in enumerate(sources, 1):
        try:
            quotes = source.quotes()
        except ProviderError as error:
            silent.append(error)
            if number == len(sources):
                raise
            continue
        checked, remarks = check_quotes(quotes)
        return PriceBook(tuple(checked), source.name, source.is_live, tuple(remarks), tuple(silent))
    raise ConfigError("no source of prices was given", "name one")


def check_quotes(quotes: Iterable[Quote]) -> tuple[list[Quote], list[str]]:
    """Return one quote per machine type and region, and what was found wrong with those given."""
    regions: dict[tuple[str, str, str], list[Quote]] = {}
    remarks: list[str] = []
    for quote in quotes:
        if sound := _sound(quote, remarks):
            regions.setdefault((quote.cloud, quote.region, quote.instance_type), []).append(sound)
    return [_of_region(zones, remarks) for zones in regions.values()], remarks


def parse_accelerator(text: str) -> tuple[str, int | None]:
    """Return name and number of `H100` or `H100:8`. Raises `ConfigError`."""
    name, separator, count = text.partition(":")
    if not name or (separator and not (count.isascii() and count.isdigit() and 0 < int(count) < 10_000)):
        raise ConfigError(f"`{text}` names no GPU", "write a name such as H100, or H100:8")
    return name, int(count) if count else None


def _sound(quote: Quote, remarks: list[str]) -> Quote | None:
    """Return `quote` without prices that cannot be, or None where nothing is left."""
    what = f"{quote.place} {quote.instance_type}"
    on_demand, spot = quote.on_demand_usd_per_hour, quote.spot_usd_per_hour
    for kind, price in (("on-demand", on_demand), ("spot", spot)):
        if price is not None and not 0 < price < math.inf:
            remarks.append(f"{what}: {kind} price {price:g} cannot be; left out")
            on_demand, spot = (None, spot) if kind == "on-demand" else (on_demand, None)
    if spot is not None and on_demand is not None and spot > on_demand:
        remarks.append(f"{what}: spot price ${spot:.4f} is above on demand, ${on_demand:.4f}; left out")
        spot = None
    if spot is None and on_demand is None:
        return None
    return replace(quote, on_demand_usd_per_hour=on_demand, spot_usd_per_hour=spot)


def _of_region(zones: list[Quote], remarks: list[str]) -> Quote:
    """Return the region's quote: median spot, lowest on-demand price; name zones that are far off."""
    spots = [zone for zone in zones if zone.spot_usd_per_hour is not None]
    prices = [zone.spot_usd_per_hour for zone in spots if zone.spot_usd_per_hour is not None]
    middle = median(prices) if prices else None
    for zone in spots:
        cheapest = zone.spot_min_usd_per_hour
        for price in {zone.spot_usd_per_hour, zone.spot_usd_per_hour if cheapest is None else cheapest}:
            if price is not None and middle is not None and not middle / FAR <= price <= middle * FAR:
                where = f"{zone.place} {zone.instance_type}" + (": one zone's" if not zone.zone else ":")
                remarks.append(
                    f"{where} spot price ${price:.4f} is far from the median ${middle:.4f}; not used"
                )
    on_demand = [z.on_demand_usd_per_hour for z in zones if z.on_demand_usd_per_hour is not None]
    return replace(
        zones[0],
        zone=zones[0].zone if len(zones) == 1 else "",
        num_zones=sum(zone.num_zones for zone in spots),
        spot_usd_per_hour=middle,
        on_demand_usd_per_hour=min(on_demand, default=None),
    )


class ShippedTable:
    """The source of prices that always answers."""

    name = "the table shipped with rlboost"
    is_live = False

    def quotes(self) -> list[Quote]:
        """Return the table. Never blocks."""
        text = resources.files("rlboost_providers.base").joinpath("price_table.csv").read_text("utf-8")
        return list(_quotes(text))


def shipped_book() -> PriceBook:
    """Return the checked prices of the shipped table."""
    return price_book([ShippedTable()])


def expected_usd_per_hour(wanted: WantedMachine) -> float | None:
    """Return the likely hourly price of a machine, as far as the shipped table knows it; for plans.

    Where its cloud is not known to sell such machines as spot ones, the price is the one on demand.
    """
    quotes = shipped_book().of(wanted)
    prices = [q.spot_usd_per_hour for q in quotes if q.spot_usd_per_hour is not None]
    prices = prices or on_demand_prices(wanted)
    limit = wanted.max_price_usd_per_hour
    if not prices:
        return limit
    return min(prices) if limit is None else min(min(prices), limit)


def on_demand_prices(wanted: WantedMachine) -> list[float]:
    """Return the on-demand prices of such machines, in dollars per hour, as the shipped table knows them."""
    quotes = shipped_book().of(wanted)
    return [q.on_demand_usd_per_hour for q in quotes if q.on_demand_usd_per_hour is not None]


def _quotes(text: str) -> Iterator[Quote]:
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        yield Quote(
            cloud=row["cloud"],
            region=row["region"],
            instance_type=row["instance_type"],
            accelerator=row["accelerator"],
            accelerator_count=int(row["accelerator_count"]),
            on_demand_usd_per_hour=_price(row["on_demand"]),
            spot_usd_per_hour=_price(row["spot_median"]),
            spot_min_usd_per_hour=_price(row["spot_min"]),
            num_zones=int(row["num_zones"]),
            as_of=row["as_of"],
            source=f"SkyPilot catalogue {row['catalogue_commit']}",
        )


def _price(cell: str) -> float | None:
    return float(cell) if cell else None
