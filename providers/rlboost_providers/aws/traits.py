"""Facts about AWS. Prices are list prices in US regions, 2026; disks are gp3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlboost_providers.base.egress import EgressOrigin, EgressPrices
from rlboost_providers.base.traits import CloudTraits, CredentialPlaces, MachineIdentity, ProviderTraits

if TYPE_CHECKING:
    from rlboost_providers.base.metadata import MetadataService

NAME = "aws"
MIN_BILLED_S = 60
"""EC2 bills Linux machines per second, at least a minute."""
LIST_LAG_S = 120.0
"""EC2's lists lag behind its launches by up to two minutes, and what ended stays listed for an hour: a
machine that existed so lately exists, though it is not listed."""


def _metadata() -> MetadataService:
    from rlboost_providers.aws.notices import AwsMetadata

    return AwsMetadata()


_ROLE = MachineIdentity(
    label="role",
    path="/latest/meta-data/iam/security-credentials/",
    headers={},
    session_path="/latest/api/token",
    session_headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    session_token_header="X-aws-ec2-metadata-token",  # noqa: S106 a header's name
)
_CLOUD = CloudTraits(
    name=NAME,
    min_billed_s=MIN_BILLED_S,
    egress=EgressPrices(
        region=0.02,  # 0.01 at each end
        origins=(
            EgressOrigin(r"(us|eu|ca)-|$", 0.02, 0.02, 0.09),
            EgressOrigin(r"(sa|af)-", 0.147, 0.147, 0.154),
            EgressOrigin(r"", 0.1105, 0.1105, 0.12),
        ),
        source="https://aws.amazon.com/ec2/pricing/on-demand/ (Data Transfer)",
    ),
    disk_usd_per_gb_month=0.08,
    address_usd_per_hour=0.005,
    is_direct=True,
    zone_pattern="([a-z]|-[a-z0-9-]+)",  # us-east-2a, us-west-2-lax-1a
    first_zone="a",
    head_ends_itself=True,
    skypilot_takes_role=True,
    credential_variables=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    credential_places=CredentialPlaces(("~/.aws/credentials",), "", _ROLE),
    metadata=_metadata,
)
PROVIDER = ProviderTraits(NAME, (_CLOUD,), min_billed_s=MIN_BILLED_S, list_lag_s=LIST_LAG_S)
