"""Reclaims as a cloud announces them to its machines: the metadata services of AWS, Google Cloud and Azure.

Guarantees: a service that does not answer, or answers nonsense, is no notice and stops nothing; a question
takes at most `ANSWER_S`; nothing of the machine's identity or credentials is asked for or kept.

Sources: EC2 user guide, "Spot Instance interruption notices" (two minutes) and "rebalance recommendations";
Compute Engine, "Spot VMs: preemption" (30 s) and "host maintenance events"; Azure, "Scheduled Events" (30 s).
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
"""Pause between two questions; the shortest notice is 30 s, and the service is on the machine's host."""
ANSWER_S = 2.0
"""Longest wait for an answer."""
TOKEN_S = 21_600
"""Life of an IMDSv2 token, its longest; it is renewed when the service no longer takes it."""
REBALANCE_S = 120.0
"""What a rebalance recommendation is taken to leave: it names no time, an interruption leaves two minutes."""
PREEMPTED_S = 30.0
"""What Google leaves once it says `preempted`."""
MAINTENANCE_S = 60.0
"""What Google leaves at least where the machine is stopped for maintenance of its host."""
AZURE_S = 30.0
"""What Azure leaves where an event's time cannot be read."""
URL_VARIABLE = "RLBOOST_METADATA_URL"
"""Instead of the service's own address, for tests."""

_LINK_LOCAL = "http://169.254.169.254"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask its own host


@dataclass(frozen=True, slots=True)
class Announced:
    """The cloud will take the machine in `seconds`; `source` says what it said."""

    seconds: float
    source: str


class Metadata(Protocol):
    """One cloud's service. `ask` blocks for up to a few times `ANSWER_S`."""

    def ask(self) -> Announced | None:
        """Return what is announced. Raises anything where there is no sensible answer."""


class AwsMetadata:
    """IMDSv2: `spot/instance-action`, then `events/recommendations/rebalance`."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/latest"
        self._token = ""

    def ask(self) -> Announced | None:
        """Return an interruption, or else a recommendation to leave."""
        action = self._read("meta-data/spot/instance-action")
        if action is not None:
            said = json.loads(action)
            return Announced(_until(said["time"], 120.0), f"EC2 will {said.get('action', 'interrupt')} it")
        if self._read("meta-data/events/recommendations/rebalance") is not None:
            return Announced(REBALANCE_S, "EC2 recommends to rebalance")
        return None

    def _read(self, path: str) -> str | None:
        for _ in range(2):
            if not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                self._token = _get(f"{self._url}/api/token", headers, method="PUT") or ""
            try:
                return _get(f"{self._url}/{path}", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code != 401:
                    raise
                self._token = ""  # it has lapsed
        return None


class GcpMetadata:
    """`instance/preempted`, then `instance/maintenance-event`."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/computeMetadata/v1/instance"

    def ask(self) -> Announced | None:
        """Return a preemption, or else a maintenance that stops the machine."""
        headers = {"Metadata-Flavor": "Google"}
        if (_get(f"{self._url}/preempted", headers) or "").strip() == "TRUE":
            return Announced(PREEMPTED_S, "Google preempts it")
        event_said = (_get(f"{self._url}/maintenance-event", headers) or "").strip()
        if event_said == "TERMINATE_ON_HOST_MAINTENANCE":
            return Announced(MAINTENANCE_S, "Google stops it for maintenance")
        return None


class AzureMetadata:
    """Scheduled events that concern this machine and take it away."""

    TAKES_AWAY = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})

    def __init__(self, url: str) -> None:
        self._url = f"{url}/metadata"
        self._name: str | None = None

    def ask(self) -> Announced | None:
        """Return the first such event."""
        headers = {"Metadata": "true"}
        said = _get(f"{self._url}/scheduledevents?api-version=2020-07-01", headers)
        events: list[dict[str, Any]] = json.loads(said)["Events"] if said else []
        for each in events:
            if each.get("EventType") in self.TAKES_AWAY and self._is_ours(each.get("Resources"), headers):
                seconds = _until(each.get("NotBefore", ""), AZURE_S)
                return Announced(seconds, f"Azure: {each['EventType']}")
        return None

    def _is_ours(self, resources: object, headers: Mapping[str, str]) -> bool:
        if self._name is None:
            path = "instance/compute/name?api-version=2021-02-01&format=text"
            self._name = (_get(f"{self._url}/{path}", headers) or "").strip()
        return not self._name or not isinstance(resources, list) or self._name in resources


def metadata_of(cloud: str) -> Metadata | None:
    """Return the service of `cloud` (aws, gcp or azure); None for any other."""
    url = os.environ.get(URL_VARIABLE, "").rstrip("/")
    match cloud:
        case "aws":
            return AwsMetadata(url or _LINK_LOCAL)
        case "gcp":
            return GcpMetadata(url or "http://metadata.google.internal")
        case "azure":
            return AzureMetadata(url or _LINK_LOCAL)
        case _:
            return None


async def wait_for_announcement(service: Metadata, every_s: float = ASK_EVERY_S) -> Announced:
    """Ask until something is announced; say once when the service stops answering, and once when it does."""
    is_silent = False
    while True:
        try:
            said = await asyncio.to_thread(service.ask)
        except Exception as error:  # noqa: BLE001 - a foreign service's edge: its answer may be anything
            if not is_silent:
                event(log, "metadata.silent", problem=repr(error))
            is_silent = True
        else:
            if said is not None:
                return said
            if is_silent:
                event(log, "metadata.answers")
            is_silent = False
        await asyncio.sleep(every_s)


def _get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str | None:
    """Return the answer's text; None where there is no such thing (404)."""
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 our own addresses
    try:
        with _opener.open(request, timeout=ANSWER_S) as answer:
            body: bytes = answer.read(65_536)
            return body.decode()
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise


def _until(text: str, otherwise: float) -> float:
    """Return the seconds until a time, from 0 to ten minutes; `otherwise` where it cannot be read.

    The machine's clock may be wrong: what lies ten minutes away is not believed.
    """
    try:
        at = datetime.fromisoformat(text).timestamp()
    except ValueError:
        parsed = email.utils.parsedate_tz(text)
        if parsed is None:
            return otherwise
        at = email.utils.mktime_tz(parsed)
    seconds = at - time.time()
    return otherwise if abs(seconds) > 600 else max(0.0, seconds)
