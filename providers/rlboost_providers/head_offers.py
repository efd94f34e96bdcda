"""What a job's `trainer.infra: CLOUD/REGION` means in a cloud's own terms: one machine, on demand.

It is bought like a machine of `rollout.spot.on_demand_floor`, but for what it runs when it boots.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from rlboost_providers.base.provider import Provider
from rlboost_providers.base.tags import owner_of
from rlboost_providers.offers import aws_pools, gcp_pools, on_demand_quotes
from rlboost_runtime.errors import ConfigError, RLBoostError
from rlboost_runtime.job import CloudOffer, Trainer
from rlboost_runtime.money import MICRO_USD_PER_USD
from rlboost_runtime.run.folder import home


def head_pool_provider(trainer: Trainer, run_folder: Path | None) -> Provider:
    """Return a provider that offers such heads and nothing else; without a run's folder it is only asked for
    offers. Raises `ConfigError`."""
    offer = cloud_offer(trainer)
    if trainer.via == "skypilot":
        from rlboost_providers.skypilot import HeadTerms, SkyPilotProvider

        return SkyPilotProvider(run_folder or home() / "sweep", [offer], head=HeadTerms(trainer.role))
    if offer.cloud == "aws":
        from rlboost_providers.aws.provider import AwsProvider

        (pool,) = aws_pools([offer], spot=False)
        price = pool.on_demand_micro_usd_per_hour or pool.max_price_micro_usd_per_hour
        if price is None:
            raise ConfigError(
                f"no price of {trainer.accelerators} in {trainer.infra} is known to this version",
                "write trainer.max_price_usd_per_hour: what such a machine costs; the books will have that",
            )
        own = replace(pool, on_demand_micro_usd_per_hour=price, instance_profile=trainer.role)
        return AwsProvider([own], owner_of(home()))
    from rlboost_providers.gcp.provider import GcpProvider

    found = gcp_pools([offer], spot=False)
    return GcpProvider([replace(each, service_account=trainer.role) for each in found], owner_of(home()))


def expected_usd_per_hour(trainer: Trainer) -> float | None:
    """Return what an hour is likely to cost, for plans: as the shipped table has it, or else the catalogue of
    SkyPilot where that is to buy it. None where nobody knows."""
    known = on_demand_quotes(cloud_offer(trainer))
    limit = trainer.max_price_usd_per_hour
    if not known and limit is None and trainer.via == "skypilot":
        with contextlib.suppress(RLBoostError):  # renting says what is wrong, and the price
            offers = head_pool_provider(trainer, None).offers()
            known = [offer.price_micro_usd_per_hour / MICRO_USD_PER_USD for offer in offers]
    if not known:
        return limit
    return min(known) if limit is None else min(min(known), limit)


def cloud_offer(trainer: Trainer) -> CloudOffer:
    """Return the entry of `rollout.spot.any_of` that would buy the same machine."""
    return CloudOffer(
        infra=trainer.infra,
        accelerators=str(trainer.accelerators),
        via=trainer.via,
        instance_type=trainer.instance_type,
        image=trainer.image,
        disk_gb=trainer.disk_gb,
        max_price_usd_per_hour=trainer.max_price_usd_per_hour,
    )
