"""What a gigabyte costs from the head to a machine in a cloud, where the job does not say it.

What a machine's disk and public address cost in a cloud that bills them beside it.
"""

from __future__ import annotations

from rlboost_runtime.money import parse_usd

LIST_USD_PER_GB = {"aws": 0.09, "gcp": 0.12, "azure": 0.087}
"""List prices of the first terabytes out to the internet, 2026; between machines of one region it is less."""


def egress_micro_usd_per_gb(cloud: str, told_usd: float | None) -> int:
    """Return micro-dollars per GB: what the job says (`told_usd`), else a list price, where one is known."""
    return parse_usd(LIST_USD_PER_GB.get(cloud, 0.0) if told_usd is None else told_usd)


HOURS_PER_MONTH = 730.0
LIST_USD_PER_GB_MONTH = {"aws": 0.08, "gcp": 0.10}
"""List prices of the disks that machines get, gp3 and pd-balanced, in US regions, 2026; of other clouds
nothing is billed."""
ADDRESS_USD_PER_HOUR = {"aws": 0.005, "gcp": 0.005}
"""List prices of a public IPv4 address in use, 2026; on Google half of it for spot machines."""


def storage_micro_usd_per_hour(cloud: str, disk_gb: int, *, spot: bool) -> int:
    """Return micro-dollars per machine-hour at list prices; 0 where none is known."""
    address = ADDRESS_USD_PER_HOUR.get(cloud, 0.0) / (2 if spot and cloud == "gcp" else 1)
    return parse_usd(LIST_USD_PER_GB_MONTH.get(cloud, 0.0) * disk_gb / HOURS_PER_MONTH + address)
