"""Facts about AWS, and its notices of reclaims. Prices are list prices in US regions, 2026; disks are gp3.

Notices come by IMDSv2: `spot/instance-action`, then `events/recommendations/rebalance`. Sources: EC2 user
guide, "Spot Instance interruption notices" (two minutes) and "rebalance recommendations".
"""

from __future__ import annotations

import json
import urllib.error

from rlboost_providers.base.egress import EgressOrigin, EgressPrices
from rlboost_providers.base.metadata import LINK_LOCAL, Announcement, get, seconds_until, service_url
from rlboost_providers.base.traits import (
    CloudTraits,
    CredentialPlaces,
    DiskThroughput,
    MachineIdentity,
    ProviderTraits,
)

NAME = "aws"
MIN_BILLED_S = 60
"""EC2 bills Linux machines per second, at least a minute."""
LIST_LAG_S = 120.0
"""EC2's lists lag behind its launches by up to two minutes, and what ended stays listed for an hour: a
machine that existed so lately exists, though it is not listed."""
TOKEN_S = 21_600
"""Life of an IMDSv2 token, its longest; it is renewed when the service no longer takes it."""
INTERRUPTION_S = 120.0
"""What an interruption leaves, where its time cannot be read."""
REBALANCE_S = 120.0
"""What a rebalance recommendation is taken to leave: it names no time, an interruption leaves two minutes."""


class AwsMetadata:
    """The `MetadataService` of EC2."""

    def __init__(self) -> None:
        self._url = f"{service_url(LINK_LOCAL)}/latest"
        self._token = ""

    def ask(self) -> Announcement | None:
        """Return an interruption, or else a recommendation to leave."""
        action = self._read("meta-data/spot/instance-action")
        if action is not None:
            announced = json.loads(action)
            seconds = seconds_until(announced["time"], INTERRUPTION_S)
            return Announcement(seconds, f"EC2 will {announced.get('action', 'interrupt')} it")
        if self._read("meta-data/events/recommendations/rebalance") is not None:
            return Announcement(REBALANCE_S, "EC2 recommends to rebalance")
        return None

    def _read(self, path: str) -> str | None:
        for _ in range(2):
            if not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                self._token = get(f"{self._url}/api/token", headers, method="PUT") or ""
            try:
                return get(f"{self._url}/{path}", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                self._token = ""  # it has expired
        return None


_ROLE = MachineIdentity(
    label="role",
    path="/latest/meta-data/iam/security-credentials/",
    headers={},
    session_path="/latest/api/token",
    session_headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    session_token_header="X-aws-ec2-metadata-token",  # noqa: S106 a header's name
)
_REGIONS = (
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "ca-west-1", "mx-central-1"),
    *("eu-central-1", "eu-central-2", "eu-west-1", "eu-west-2", "eu-west-3", "eu-north-1"),
    *("eu-south-1", "eu-south-2", "il-central-1", "me-central-1", "me-south-1", "af-south-1", "sa-east-1"),
    *("ap-east-1", "ap-east-2", "ap-south-1", "ap-south-2"),
    *("ap-northeast-1", "ap-northeast-2", "ap-northeast-3"),
    *("ap-southeast-1", "ap-southeast-2", "ap-southeast-3", "ap-southeast-4", "ap-southeast-5"),
    *("ap-southeast-6", "ap-southeast-7", "us-gov-east-1", "us-gov-west-1", "cn-north-1", "cn-northwest-1"),
)
"""As of 2026: https://docs.aws.amazon.com/global-infrastructure/latest/regions/aws-regions.html"""
_GP3 = DiskThroughput(
    included=125, most=1000, usd_per_mib_per_s=0.04,
    included_iops=3000, iops_per_mib_per_s=4, usd_per_iops=0.005,
)  # fmt: skip
"""List prices of us-east-1: https://aws.amazon.com/ebs/pricing/. They were not checked against
an account. `most` is what gp3 had from 2020 on; higher limits are not used. It takes 4 IOPS per MiB/s."""
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
        as_of="2026",
    ),
    disk_usd_per_gb_month=0.08,
    disk_throughput=_GP3,
    address_usd_per_hour=0.005,
    is_direct=True,
    regions=_REGIONS,
    zone_pattern="([a-z]|-[a-z0-9-]+)",  # us-east-2a, us-west-2-lax-1a
    first_zone="a",
    reservation_pattern="cr-[0-9a-f]{8,17}",
    reservation_example="cr-0123456789abcdef0",
    head_ends_itself=True,
    skypilot_takes_role=True,
    credential_variables=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    credential_places=CredentialPlaces(("~/.aws/credentials",), "", _ROLE),
    metadata=AwsMetadata,
)
PROVIDER = ProviderTraits(NAME, (_CLOUD,), min_billed_s=MIN_BILLED_S, list_lag_s=LIST_LAG_S)
