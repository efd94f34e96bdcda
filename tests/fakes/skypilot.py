"""SkyPilot's answers without SkyPilot: clusters in memory, for faults that the real one will not show.

Stands in for `SkyPilotProcess`; the real one is tried in tests/cloud.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlboost_providers.skypilot.errors import explained

PLACES = [
    {
        "cloud": "aws",
        "region": region,
        "zone": f"{region}a",
        "instance_type": "g5.xlarge",
        "usd_per_hour": price,
    }
    for region, price in (("us-west-2", 0.35), ("us-east-1", 0.41))
]
PLACES.append({**PLACES[0], "cloud": "lambda", "zone": None, "instance_type": "gpu_1x_a10"})
ON_DEMAND = 1.006
WITHOUT_SPOT = ("lambda",)


class FakeSkyPilot:
    """A cloud that launches in no time. `refuse` maps zones to (kind, text) of what SkyPilot raises there.

    Without `says_up` a launch is answered once its setup is over.
    """

    def __init__(self, *, says_up: bool = True) -> None:
        self._says_up = says_up
        self.clusters: dict[str, dict[str, Any]] = {}
        self.launched: list[str] = []
        self.roles: list[tuple[str, bool]] = []
        """Whom each machine was to be taken for, and whether only for that."""
        self.forced = 0
        self.refuse: dict[str, tuple[str, str]] = {}
        self.setup_fails = False
        self.hold: threading.Event | None = None
        """Where given, setups wait for it."""
        self.is_down = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def ask(self, do: str, timeout_s: float, **arguments: object) -> Any:
        return self.begin(do, lambda line: None, **arguments).result(timeout_s)

    def begin(self, do: str, hear: Callable[[str], None], **arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        thread = threading.Thread(target=self._obey, args=(answer, do, hear, arguments))
        thread.start()
        self._threads.append(thread)
        return answer

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=10)

    def reclaim(self, cluster: str) -> None:
        with self._lock:
            del self.clusters[cluster]

    def _obey(
        self, answer: Future[Any], do: str, hear: Callable[[str], None], arguments: dict[str, Any]
    ) -> None:
        try:
            if self.is_down:
                raise explained("ApiServerConnectionError", "Could not connect to SkyPilot API server")
            result = getattr(self, f"_{do}")(hear=hear, **arguments)
        except Exception as problem:
            answer.set_exception(problem)
        else:
            answer.set_result(result)

    def _start(self, hear: Callable[[str], None]) -> str:
        return "0.14.1"

    def _prices(self, hear: Callable[[str], None], infra: str, **asked: object) -> list[dict[str, Any]]:
        places = [p for p in PLACES if f"{p['cloud']}/{p['region']}/".startswith(infra.rstrip("/") + "/")]
        as_spot = asked["spot"] and infra.partition("/")[0] not in WITHOUT_SPOT
        price = {} if as_spot else {"usd_per_hour": ON_DEMAND}
        return [{**place, **price, "spot": as_spot} for place in places]

    def _launch(
        self, hear: Callable[[str], None], cluster: str, task: str, idle_minutes: int, role: str, only: bool
    ) -> dict[str, Any]:
        hear("request 1234")
        resources = YAML(typ="safe").load(Path(task))["resources"]
        cloud, region, zone = resources["infra"].split("/")
        hear(f"⚙︎ Launching on {cloud} {region} ({zone}).")
        if zone in self.refuse:
            kind, text = self.refuse[zone]
            hear(f"AWS handler error: An error occurred {text}")
            raise explained(kind, "Failed to provision all possible launchable resources")
        row = {"name": cluster, "cloud": cloud, "region": region, "zone": zone, "status": "INIT"}
        row |= {"address": "203.0.113.9", "internal": "127.0.0.1", "port": 1, "labels": resources["labels"]}
        with self._lock:
            self.launched.append(cluster)
            self.roles.append((role, only))
            self.clusters[cluster] = {**row, "launched_at": time.time()}
        if self._says_up:
            hear("└── Instance is up.")
        if self.hold is not None:
            self.hold.wait(10)
        if self.setup_fails:
            raise explained(
                "CommandError", "Command bash ~/rlboost-shipment/install.sh failed with return code 1"
            )
        with self._lock:
            if cluster not in self.clusters:
                raise explained("RequestCancelled", "request cancelled")
            self.clusters[cluster]["status"] = "UP"
            return dict(self.clusters[cluster])

    def _clusters(
        self, hear: Callable[[str], None], names: list[str] | None, force: bool
    ) -> list[dict[str, Any]]:
        self.forced += force
        with self._lock:
            return [dict(row) for name, row in self.clusters.items() if names is None or name in names]

    def _down(self, hear: Callable[[str], None], cluster: str, request: str) -> bool:
        with self._lock:
            return self.clusters.pop(cluster, None) is not None
