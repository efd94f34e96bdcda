"""Reclaims as Compute Engine announces them: `instance/preempted`, then `instance/maintenance-event`.

Sources: Compute Engine, "Spot VMs: preemption" (30 s) and "host maintenance events".
"""

from __future__ import annotations

from collections.abc import Mapping

from rlboost_providers.base.metadata import Announcement, get, service_url

PREEMPTED_S = 30.0
"""What Google leaves once `preempted` is set."""
MAINTENANCE_S = 60.0
"""What Google leaves at least where the machine is stopped for maintenance of its host."""


class GcpMetadata:
    """The `MetadataService` of Compute Engine."""

    def __init__(self, host: str, headers: Mapping[str, str]) -> None:
        self._url = f"{service_url(host)}/computeMetadata/v1/instance"
        self._headers = headers

    def ask(self) -> Announcement | None:
        """Return a preemption, or else a maintenance that stops the machine."""
        if self._read("preempted") == "TRUE":
            return Announcement(PREEMPTED_S, "Google preempts it")
        if self._read("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return Announcement(MAINTENANCE_S, "Google stops it for maintenance")
        return None

    def _read(self, path: str) -> str:
        return (get(f"{self._url}/{path}", self._headers) or "").strip()
