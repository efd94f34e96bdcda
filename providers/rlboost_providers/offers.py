"""What a job's `via: direct` offers mean in a cloud's own terms: machine types, images, prices.

Machine types and prices come from the shipped table where the job file does not say them; EC2 is asked for
its prices later, Google tells none. An offer that nobody knows a price of is refused: it would be bought
blindly.

Prices of now, where a cloud tells them: EC2's spot prices over the shipped table, which has the others'.

Costs a request per region that the table knows; nothing is bought, and AWS asks no money for the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlboost_providers.aws.prices import PriceHistory, SpotPrices
from rlboost_providers.aws.provider import AwsPool, ec2_client
from rlboost_providers.base.charges import egress_micro_usd_per_gb, storage_micro_usd_per_hour
from rlboost_providers.base.prices import PriceBook, Quote, ShippedTable, parse_accelerator, price_book
from rlboost_providers.base.startup import installation
from rlboost_providers.gcp.provider import DEFAULT_IMAGE, GcpPool
from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import CloudOffer
from rlboost_runtime.money import parse_usd

AWS_IMAGE = (
    "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
)
"""Where the job names no image: Amazon's newest with the GPU's driver, Ubuntu and nothing of ours."""


def aws_pools(offers: Sequence[CloudOffer], *, spot: bool = True) -> list[AwsPool]:
    """Return the pools of `offers` in aws. Raises `ConfigError` where machine types are not known."""
    book = shipped()
    return [_aws_pool(book, offer, spot) for offer in offers]


def gcp_pools(offers: Sequence[CloudOffer], *, spot: bool = True) -> list[GcpPool]:
    """Return the pools of `offers` in gcp. Raises `ConfigError` where type or price are not known."""
    book = shipped()
    found = [_gcp_pool(book, offer, spot) for offer in offers]
    return [pool for pool in found if pool is not None]


def expected_usd_per_hour(offer: CloudOffer) -> float | None:
    """Return what a machine of `offer` is likely to cost, as far as the shipped table knows; for plans.

    Where its cloud is not known to sell such machines as spot ones, that is what they cost on demand.
    """
    quotes = _quotes(shipped(), offer)
    prices = [q.spot_usd_per_hour for q in quotes if q.spot_usd_per_hour is not None]
    prices = prices or on_demand_quotes(offer)
    limit = offer.max_price_usd_per_hour
    if not prices:
        return limit
    return min(prices) if limit is None else min(min(prices), limit)


def on_demand_quotes(offer: CloudOffer) -> list[float]:
    """Return what machines of `offer` cost on demand, in dollars per hour, as the shipped table knows it."""
    quotes = _quotes(shipped(), offer)
    return [q.on_demand_usd_per_hour for q in quotes if q.on_demand_usd_per_hour is not None]


def shipped() -> PriceBook:
    """Return the checked prices of the shipped table."""
    return price_book([ShippedTable()])


def _aws_pool(book: PriceBook, offer: CloudOffer, spot: bool) -> AwsPool:
    image, install = _software(offer, AWS_IMAGE)
    on_demand = on_demand_quotes(offer)
    return AwsPool(
        region=str(offer.region),
        accelerator=offer.accelerators,
        instance_types=_types(book, offer),
        image=image,
        max_price_micro_usd_per_hour=_micro(offer.max_price_usd_per_hour),
        on_demand_micro_usd_per_hour=_micro(max(on_demand, default=None)),
        spot=spot,
        disk_gb=offer.disk_gb,
        install=install,
        egress_micro_usd_per_gb=egress_micro_usd_per_gb(offer.cloud, offer.egress_usd_per_gb),
        storage_micro_usd_per_hour=storage_micro_usd_per_hour(offer.cloud, offer.disk_gb, spot=spot),
        zone=offer.zone,
    )


def _gcp_pool(book: PriceBook, offer: CloudOffer, spot: bool) -> GcpPool | None:
    image, install = _software(offer, DEFAULT_IMAGE)
    (machine_type, *_) = _types(book, offer)
    quotes = [q for q in _quotes(book, offer) if q.instance_type == machine_type]
    price = next((q.spot_usd_per_hour if spot else q.on_demand_usd_per_hour for q in quotes), None)
    source = f"{book.source}, {quotes[0].as_of}" if quotes else ""
    limit = offer.max_price_usd_per_hour
    if price is None:
        if limit is None:
            raise ConfigError(
                f"no price of {machine_type} in {offer.infra} is known, and Google's API tells none",
                "write max_price_usd_per_hour: what such a machine costs at most",
            )
        price, source = limit, "the job file's max_price_usd_per_hour"
    if limit is not None and price > limit:
        return None  # Google takes no bids: what costs more is not bought
    return GcpPool(
        region=str(offer.region),
        accelerator=offer.accelerators,
        machine_type=machine_type,
        price_micro_usd_per_hour=parse_usd(price),
        price_source=source,
        zones=() if offer.zone is None else (offer.zone,),
        spot=spot,
        image=image,
        disk_gb=offer.disk_gb,
        install=install,
        egress_micro_usd_per_gb=egress_micro_usd_per_gb(offer.cloud, offer.egress_usd_per_gb),
        storage_micro_usd_per_hour=storage_micro_usd_per_hour(offer.cloud, offer.disk_gb, spot=spot),
    )


def _software(offer: CloudOffer, default: str) -> tuple[str, str]:
    """Return the image's name, and how rlboost and the engine come onto it: not at all where the job names an
    image, which has them."""
    return (default, installation()) if offer.image is None else (offer.image, "")


def _types(book: PriceBook, offer: CloudOffer) -> tuple[str, ...]:
    """Return the machine types that the offer stands for: they are the same in every region."""
    if offer.instance_type is not None:
        return (offer.instance_type,)
    name, count = parse_accelerator(offer.accelerators)
    found = {q.instance_type for q in book.find(accelerator=name, count=count or 1, infra=offer.cloud)}
    if not found:
        raise ConfigError(
            f"which machine of {offer.cloud} has {offer.accelerators} is not known to this version",
            "write instance_type, such as instance_type: p5.48xlarge",
        )
    return tuple(sorted(found))


def _quotes(book: PriceBook, offer: CloudOffer) -> list[Quote]:
    name, count = parse_accelerator(offer.accelerators)
    where = "/".join(offer.infra.split("/")[:2])
    quotes = book.find(accelerator=name, count=count or 1, infra=where)
    return [q for q in quotes if offer.instance_type in (None, q.instance_type)]


def _micro(usd: float | None) -> int | None:
    return None if usd is None else parse_usd(usd)


class LivePrices:
    """A `prices.PriceSource`. `infra`: as in job files; only regions in it are asked."""

    def __init__(self, infra: str | None = None) -> None:
        self._known = ShippedTable().quotes()
        wanted = "" if infra is None else infra.rstrip("/") + "/"
        self._regions = {
            q.region for q in self._known if q.cloud == "aws" and f"aws/{q.region}/".startswith(wanted)
        }
        self.is_live = bool(self._regions)
        self.name = "EC2's spot price history" if self._regions else ShippedTable.name

    def quotes(self) -> list[Quote]:
        """Return EC2's spot prices and the table's quotes of other clouds. Raises `ProviderError`,
        `ConfigError`."""
        if not self._regions:
            return self._known
        others = [quote for quote in self._known if quote.cloud != "aws"]
        history = {
            region: SpotPrices(partial(ec2_client, region), region) for region in sorted(self._regions)
        }
        return [*PriceHistory(history, self._known).quotes(), *others]
