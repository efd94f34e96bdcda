"""Facts about Google Cloud. Prices are list prices in US regions, 2026; disks are pd-balanced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlboost_providers.base.egress import EgressOrigin, EgressPrices
from rlboost_providers.base.traits import (
    CloudTraits,
    CredentialPlaces,
    MachineIdentity,
    ProviderTraits,
    SelfDeletion,
)

if TYPE_CHECKING:
    from rlboost_providers.base.metadata import MetadataService

NAME = "gcp"
MIN_BILLED_S = 60
"""Compute Engine bills per second, at least a minute."""
METADATA_HOST = "http://metadata.google.internal"
METADATA_HEADERS = {"Metadata-Flavor": "Google"}


def _metadata() -> MetadataService:
    from rlboost_providers.gcp.notices import GcpMetadata

    return GcpMetadata(METADATA_HOST, METADATA_HEADERS)


_ACCOUNT = "instance/service-accounts/default"
_CREDENTIALS = CredentialPlaces(
    ("~/.config/gcloud/application_default_credentials.json",),
    "GOOGLE_APPLICATION_CREDENTIALS",
    MachineIdentity("service account", f"/computeMetadata/v1/{_ACCOUNT}/email", METADATA_HEADERS),
)
_DELETION = SelfDeletion(
    metadata_url=f"{METADATA_HOST}/computeMetadata/v1/",
    headers=METADATA_HEADERS,
    token_path=f"{_ACCOUNT}/token",
    name_paths={"project": "project/project-id", "zone": "instance/zone", "name": "instance/name"},
    url="https://compute.googleapis.com/compute/v1/projects/{project}/zones/{zone}/instances/{name}",
)
_CLOUD = CloudTraits(
    name=NAME,
    min_billed_s=MIN_BILLED_S,
    egress=EgressPrices(
        region=0.01,
        origins=(
            EgressOrigin(r"(us|northamerica)-|$", 0.02, 0.14, 0.12),
            EgressOrigin(r"europe-", 0.02, 0.14, 0.12),
            EgressOrigin(r"asia-", 0.08, 0.14, 0.12),
            EgressOrigin(r"", 0.14, 0.14, 0.19),
        ),
        source="https://cloud.google.com/vpc/network-pricing (Premium Tier)",
    ),
    disk_usd_per_gb_month=0.10,
    address_usd_per_hour=0.005,
    spot_address_share=0.5,
    is_direct=True,
    zone_pattern="-[a-z0-9]+",  # us-central1-a
    first_zone="-a",
    head_may_name_zone=True,
    head_ends_itself=True,
    skypilot_has_role=True,
    credential_variables=("GOOGLE_APPLICATION_CREDENTIALS",),
    credential_places=_CREDENTIALS,
    self_deletion=_DELETION,
    metadata=_metadata,
)
PROVIDER = ProviderTraits(NAME, (_CLOUD,), min_billed_s=MIN_BILLED_S)
