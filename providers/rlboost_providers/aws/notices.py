"""Reclaims as EC2 announces them: IMDSv2, `spot/instance-action`, then `events/recommendations/rebalance`.

Sources: EC2 user guide, "Spot Instance interruption notices" (two minutes) and "rebalance recommendations".
"""

from __future__ import annotations

import json
import urllib.error

from rlboost_providers.base.metadata import LINK_LOCAL, Announcement, get, seconds_until, service_url

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
