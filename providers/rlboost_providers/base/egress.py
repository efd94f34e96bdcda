"""What a gigabyte costs on its way between two places, at list prices.

The cloud that the bytes leave bills them; what comes in is free everywhere. Traffic goes over public
addresses, so within a region it is billed as traffic between zones is (AWS: at both ends), in whichever zone.
Prices are those of the first terabytes, in USD per 10^9 bytes, as published for 2026; regions and ways that
share a row have the dearest. Monthly free amounts and discounts are left out: the bill should not be more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """A place as `infra` of a job file names it; `region` empty: not known."""

    cloud: str
    region: str = ""

    @classmethod
    def of(cls, infra: str) -> Location:
        """Return the place of CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE."""
        cloud, region, *_ = [*infra.split("/"), ""]
        return cls(cloud, region)


@dataclass(frozen=True, slots=True)
class EgressOrigin:
    """Prices of what leaves the regions of a continent."""

    regions: str
    """Pattern of their names."""
    continent: float
    """To another region of the same row."""
    world: float
    """To any other region of the cloud."""
    internet: float
    """To another cloud, or to no cloud."""


@dataclass(frozen=True, slots=True)
class EgressPrices:
    """Prices of one cloud."""

    region: float = 0.0
    """Within a region, of both ends together."""
    origins: tuple[EgressOrigin, ...] = ()
    """The first that matches counts; none: the cloud bills no traffic."""
    source: str = ""
    """Where the cloud publishes them."""
    as_of: str = ""
    """Day, or year, of the price list that they are from."""

    def usd_per_gb(self, source: Location, target: Location | None) -> float:
        """Return the price from `source`, which is in this cloud; `target` None: outside all clouds."""
        origin = next((o for o in self.origins if re.match(o.regions, source.region)), None)
        if origin is None:
            return 0.0
        if target is None or target.cloud != source.cloud:
            return origin.internet
        if not source.region or not target.region:
            return origin.world
        if source.region == target.region:
            return self.region
        return origin.continent if re.match(origin.regions, target.region) else origin.world


FREE = EgressPrices()
