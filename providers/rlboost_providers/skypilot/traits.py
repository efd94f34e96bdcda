"""Facts about SkyPilot, and about the clouds that are reached through it alone. Prices are of 2026."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlboost_providers.base.traits import CloudTraits, ProviderTraits

if TYPE_CHECKING:
    from rlboost_providers.base.metadata import MetadataService

NAME = "skypilot"


def _azure_metadata() -> MetadataService:
    from rlboost_providers.skypilot.notices import AzureMetadata

    return AzureMetadata()


PROVIDER = ProviderTraits(
    NAME,
    (
        CloudTraits("azure", egress_usd_per_gb=0.087, metadata=_azure_metadata),
        CloudTraits("kubernetes", can_host_head=False),
        CloudTraits("k8s", can_host_head=False),
        CloudTraits("lambda"),
        CloudTraits("nebius"),
        CloudTraits("runpod", can_host_head=False),
    ),
    min_billed_s=60,  # books that do not record it are of versions that billed every cloud so
)
