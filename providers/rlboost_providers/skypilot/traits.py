"""Facts about SkyPilot, and about the clouds that are reached through it alone. Prices are of 2026."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlboost_providers.base.egress import EgressOrigin, EgressPrices
from rlboost_providers.base.traits import CloudTraits, ProviderTraits

if TYPE_CHECKING:
    from rlboost_providers.base.metadata import MetadataService

NAME = "skypilot"


def _azure_metadata() -> MetadataService:
    from rlboost_providers.skypilot.notices import AzureMetadata

    return AzureMetadata()


_AZURE_EGRESS = EgressPrices(
    region=0.0,  # between zones too
    origins=(
        EgressOrigin(r".*us\d?$|canada|$", 0.02, 0.05, 0.087),
        EgressOrigin(
            r".*(europe|uk|france|germany|sweden|switzerland|norway|poland|italy|spain)", 0.02, 0.05, 0.087
        ),
        EgressOrigin(r"brazil", 0.16, 0.16, 0.181),
        EgressOrigin(r"", 0.08, 0.08, 0.12),
    ),
    source="https://azure.microsoft.com/pricing/details/bandwidth/",
)

PROVIDER = ProviderTraits(
    NAME,
    (
        CloudTraits("azure", egress=_AZURE_EGRESS, metadata=_azure_metadata),
        CloudTraits("kubernetes", can_host_head=False),
        CloudTraits("k8s", can_host_head=False),
        CloudTraits("lambda"),
        CloudTraits("nebius"),
        CloudTraits("runpod", can_host_head=False),
    ),
    min_billed_s=60,  # books that do not record it are of versions that billed every cloud so
)
