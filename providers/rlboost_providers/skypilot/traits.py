"""Facts about SkyPilot, and about the clouds that are reached through it alone. Prices are of 2026.

Reclaims as Azure announces them: scheduled events of the machine. Source: Azure, "Scheduled Events" (30 s).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlboost_providers.base.egress import EgressOrigin, EgressPrices
from rlboost_providers.base.metadata import LINK_LOCAL, Announcement, get, seconds_until, service_url
from rlboost_providers.base.traits import CloudTraits, ProviderTraits

NAME = "skypilot"
NOTICE_S = 30.0
"""What Azure leaves where an event's time cannot be read."""
TAKES_AWAY = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})


class AzureMetadata:
    """The `MetadataService` of Azure: events that concern this machine and take it away."""

    def __init__(self) -> None:
        self._url = f"{service_url(LINK_LOCAL)}/metadata"
        self._name: str | None = None

    def ask(self) -> Announcement | None:
        """Return the first such event."""
        headers = {"Metadata": "true"}
        answer = get(f"{self._url}/scheduledevents?api-version=2020-07-01", headers)
        events: list[dict[str, Any]] = json.loads(answer)["Events"] if answer else []
        for each in events:
            if each.get("EventType") in TAKES_AWAY and self._is_ours(each.get("Resources"), headers):
                seconds = seconds_until(each.get("NotBefore", ""), NOTICE_S)
                return Announcement(seconds, f"Azure: {each['EventType']}")
        return None

    def _is_ours(self, resources: object, headers: Mapping[str, str]) -> bool:
        if self._name is None:
            path = "instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (get(f"{self._url}/{path}", headers) or "").strip()
        return not self._name or not isinstance(resources, list) or self._name in resources


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
    as_of="2026",
)


def _no_egress(source: str, as_of: str) -> EgressPrices:
    """Return the prices of a cloud whose price list bills no traffic."""
    return EgressPrices(source=source, as_of=as_of)


PROVIDER = ProviderTraits(
    NAME,
    (
        CloudTraits("azure", egress=_AZURE_EGRESS, metadata=AzureMetadata),
        CloudTraits("kubernetes", can_host_head=False),
        CloudTraits("k8s", can_host_head=False),
        CloudTraits("lambda", egress=_no_egress("https://lambda.ai/instances", "2026-09-20")),
        CloudTraits("nebius", egress=_no_egress("https://docs.nebius.com/compute/resources/pricing", "2026")),
        CloudTraits(
            "runpod",
            can_host_head=False,
            egress=_no_egress("https://docs.runpod.io/pods/pricing", "2026"),
        ),
    ),
    min_billed_s=60,  # books that do not record it are of versions that billed every cloud so
)
