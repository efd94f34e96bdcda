"""Facts about Google Cloud, and its notices of reclaims.

Prices are list prices in US regions, 2026; disks are pd-balanced. Notices: `instance/preempted`, then
`instance/maintenance-event`. Sources: Compute Engine, "Spot VMs: preemption" (30 s) and "host maintenance
events".
"""

from __future__ import annotations

from rlboost_providers.base.egress import EgressOrigin, EgressPrices
from rlboost_providers.base.metadata import Announcement, get, service_url
from rlboost_providers.base.traits import (
    CloudTraits,
    CredentialPlaces,
    DiskThroughput,
    MachineIdentity,
    ProviderTraits,
    SelfDeletion,
)

NAME = "gcp"
MIN_BILLED_S = 60
"""Compute Engine bills per second, at least a minute."""
METADATA_HOST = "http://metadata.google.internal"
METADATA_HEADERS = {"Metadata-Flavor": "Google"}


PREEMPTED_S = 30.0
"""What Google leaves once `preempted` is set."""
MAINTENANCE_S = 60.0
"""What Google leaves at least where the machine is stopped for maintenance of its host."""


class GcpMetadata:
    """The `MetadataService` of Compute Engine."""

    def __init__(self) -> None:
        self._url = f"{service_url(METADATA_HOST)}/computeMetadata/v1/instance"

    def ask(self) -> Announcement | None:
        """Return a preemption, or else a maintenance that stops the machine."""
        if self._read("preempted") == "TRUE":
            return Announcement(PREEMPTED_S, "Google preempts it")
        if self._read("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return Announcement(MAINTENANCE_S, "Google stops it for maintenance")
        return None

    def _read(self, path: str) -> str:
        return (get(f"{self._url}/{path}", METADATA_HEADERS) or "").strip()


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
_REGIONS = (
    *("us-central1", "us-central2", "us-east1", "us-east4", "us-east5", "us-east7", "us-south1"),
    *("us-west1", "us-west2", "us-west3", "us-west4", "us-west8"),
    *("northamerica-northeast1", "northamerica-northeast2", "northamerica-south1"),
    *("southamerica-east1", "southamerica-west1", "africa-south1"),
    *("europe-central2", "europe-north1", "europe-north2", "europe-southwest1"),
    *("europe-west1", "europe-west2", "europe-west3", "europe-west4", "europe-west6", "europe-west8"),
    *("europe-west9", "europe-west10", "europe-west12", "me-central1", "me-central2", "me-west1"),
    *("asia-east1", "asia-east2", "asia-northeast1", "asia-northeast2", "asia-northeast3"),
    *("asia-south1", "asia-south2", "asia-southeast1", "asia-southeast2", "asia-southeast3"),
    *("australia-southeast1", "australia-southeast2"),
)
"""As of 2026: https://cloud.google.com/compute/docs/regions-zones"""
_HYPERDISK = DiskThroughput(
    included=140, most=2400, usd_per_mib_per_s=0.04,
    included_iops=3000, iops_per_mib_per_s=4, usd_per_iops=0.005,
    gpus=frozenset({"H100", "H100-MEGA-80GB", "H200", "B200", "GB200"}),
)  # fmt: skip
"""Hyperdisk Balanced, which takes 4 IOPS per MiB/s; list prices of us-central1, not checked against an
account: https://cloud.google.com/compute/disks-image-pricing. Machines with L4, A100 and older GPUs do not
boot from it: their pd-balanced is as fast as it is large."""
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
        as_of="2026-09-20",
    ),
    disk_usd_per_gb_month=0.10,
    disk_throughput=_HYPERDISK,
    address_usd_per_hour=0.005,
    spot_address_share=0.5,
    is_direct=True,
    regions=_REGIONS,
    zone_pattern="-[a-z0-9]+",  # us-central1-a
    first_zone="-a",
    head_may_name_zone=True,
    reservation_pattern=r"[a-z][a-z0-9-]{0,62}|projects/[a-z0-9:.-]+/reservations/[a-z][a-z0-9-]{0,62}",
    reservation_example="NAME or projects/PROJECT/reservations/NAME",
    has_flex_start=True,
    head_ends_itself=True,
    skypilot_has_role=True,
    credential_variables=("GOOGLE_APPLICATION_CREDENTIALS",),
    credential_places=_CREDENTIALS,
    self_deletion=_DELETION,
    metadata=GcpMetadata,
)
PROVIDER = ProviderTraits(NAME, (_CLOUD,), min_billed_s=MIN_BILLED_S)
