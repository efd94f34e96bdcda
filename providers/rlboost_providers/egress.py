"""What a gigabyte costs from the head to a machine in a cloud, where the job does not say it."""

from __future__ import annotations

from rlboost_runtime.core.money import parse_usd

LIST_USD_PER_GB = {"aws": 0.09, "gcp": 0.12, "azure": 0.087}
"""List prices of the first terabytes out to the internet, 2026; between machines of one region it is less."""


def egress_micro_usd_per_gb(cloud: str, told_usd: float | None) -> int:
    """Return micro-dollars per GB: what the job says (`told_usd`), else a list price, where one is known."""
    return parse_usd(LIST_USD_PER_GB.get(cloud, 0.0) if told_usd is None else told_usd)
