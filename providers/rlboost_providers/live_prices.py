"""Prices of now, where a cloud tells them: EC2's spot prices over the shipped table, which has the others'.

Costs a request per region that the table knows; nothing is bought, and AWS asks no money for the answer.
"""

from __future__ import annotations

from functools import partial

from rlboost_providers.aws import ec2_client
from rlboost_providers.aws_prices import PriceHistory, SpotPrices
from rlboost_providers.price_table import ShippedTable
from rlboost_providers.prices import Quote


class LivePrices:
    """A `prices.PriceSource`. `infra`: as in job files; only regions in it are asked."""

    name = "EC2's spot price history, now"
    is_live = True

    def __init__(self, infra: str | None = None) -> None:
        self._infra = infra

    def quotes(self) -> list[Quote]:
        """Return EC2's spot prices and the table's quotes of other clouds. Raises `ProviderError`,
        `ConfigError`."""
        known = ShippedTable().quotes()
        wanted = "" if self._infra is None else self._infra.rstrip("/") + "/"
        regions = {q.region for q in known if q.cloud == "aws" and f"aws/{q.region}/".startswith(wanted)}
        others = [quote for quote in known if quote.cloud != "aws"]
        if not regions:
            return others
        history = {region: SpotPrices(partial(ec2_client, region), region) for region in sorted(regions)}
        return [*PriceHistory(history, known).quotes(), *others]
