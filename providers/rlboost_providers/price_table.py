"""The small table of prices that is shipped, so that prices and plans work without a network.

It knows a few machine types in a few regions, and is as old as its `as_of` says: good for a plan, not for a
bid.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources

from rlboost_providers.prices import Quote


class ShippedTable:
    """The source of prices that always answers."""

    name = "the table shipped with rlboost"
    is_live = False

    def quotes(self) -> list[Quote]:
        """Return the table. Never blocks."""
        text = resources.files("rlboost_providers").joinpath("price_table.csv").read_text(encoding="utf-8")
        return list(_quotes(text))


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
