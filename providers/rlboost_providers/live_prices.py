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
