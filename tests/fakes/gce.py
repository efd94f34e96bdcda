"""Compute Engine's REST API on loopback: operations that take time, errors where Google puts them.

Stock-outs come in the operation, refusals as HTTP errors with reasons; lists are paged, two zones a page;
requests with a known request id answer with the first one's operation; `wait` holds its answer until the
operation has ended, for two minutes at most. Machines really run their start-up
script, where a folder is given.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from google.auth.credentials import AnonymousCredentials

from rlboost_providers.gcp.provider import GcpClients, make_clients
from tests.fakes.hypervisor import Hypervisor

PROJECT = "lab"
REGION = "us-central1"
ZONES = ("us-central1-a", "us-central1-b", "us-central1-f", "us-east4-a")
API = r"/compute/v1/projects/([^/]+)"
HOLDS_S = 120.0
"""Longest that Google holds the answer to a `wait`."""


@dataclass
class HttpRefusal:
    """An HTTP error instead of the answer, to the first calls whose path matches."""

    path: str
    status: int
    reason: str
    times: int = 1


@dataclass
class FakeGce:
    """One project."""

    url: str = ""
    hypervisor: Hypervisor | None = None
    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    """Operation by request id."""
    stock: dict[str, int] = field(default_factory=dict)
    """Machines that a zone can still give; zones that are not named give any number."""
    errors: dict[str, str] = field(default_factory=dict)
    """By zone: the code with which a launch fails in its operation."""
    refusals: deque[HttpRefusal] = field(default_factory=deque)
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    images: dict[str, dict[str, Any]] = field(default_factory=dict)
    image_bodies: list[dict[str, Any]] = field(default_factory=list)
    console: str = ""
    """What machines write to their first serial port."""
    operation_s: float = 0.05
    """How long operations take."""
    never_done: bool = False
    ends: dict[str, float] = field(default_factory=dict)
    """By operation: when it ends, in monotonic seconds."""
    delete_s: float = 0.02
    number: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def clients(self) -> GcpClients:
        return make_clients(PROJECT, AnonymousCredentials(), self.url)

    # --- what tests do ------------------------------------------------------------------------------------

    def living(self) -> list[dict[str, Any]]:
        return [each for each in self.instances.values() if each["status"] in ("RUNNING", "STAGING")]

    def reclaim(self, machine: str) -> None:
        """Take a machine as Google does: an operation of the system's, then it is deleted."""
        with self.lock:
            (zone, name) = next(
                k for k, v in self.instances.items() if v["labels"]["rlboost-machine"] == machine
            )
            self._operation(zone, "compute.instances.preempted", name, done=True)
            self._remove(zone, name)

    def powered_off(self, machine: str) -> None:
        """The guest shut itself down: the instance stays, stopped."""
        with self.lock:
            for (zone, name), instance in self.instances.items():
                if instance["labels"]["rlboost-machine"] == machine:
                    instance["status"] = "TERMINATED"
                    instance["lastStopTimestamp"] = _now()
                    self._operation(zone, "compute.instances.guestTerminate", name, done=True)
                    if self.hypervisor is not None:
                        self.hypervisor.stop(machine)

    # --- the API ------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        self.calls.append(f"{method} {path}")
        held = re.fullmatch(rf"POST {API}/zones/([^/]+)/operations/([^/]+)/wait", f"{method} {path}")
        if held is not None:
            self._hold(held[3])
        with self.lock:
            for operation in self.operations.values():
                if self._has_ended(operation["name"]):
                    operation["status"] = "DONE"
            for refusal in self.refusals:
                if re.search(refusal.path, f"{method} {path}"):
                    refusal.times -= 1
                    if refusal.times < 1:
                        self.refusals.remove(refusal)
                    return refusal.status, _error(refusal.status, refusal.reason)
            for pattern, handle in (
                (rf"GET {API}/aggregated/machineTypes", self._machine_types),
                (rf"GET {API}/aggregated/instances", self._list),
                (rf"GET {API}/aggregated/operations", self._list_operations),
                (rf"POST {API}/global/images", self._insert_image),
                (rf"GET {API}/global/images", self._list_images),
                (rf"GET {API}/global/images/([^/]+)", self._get_image),
                (rf"DELETE {API}/global/images/([^/]+)", self._delete_image),
                (rf"GET {API}/global/operations/([^/]+)", self._get_global_operation),
                (rf"POST {API}/zones/([^/]+)/instances", self._insert),
                (rf"GET {API}/zones/([^/]+)/instances/([^/]+)", self._get),
                (rf"GET {API}/zones/([^/]+)/instances/([^/]+)/serialPort", self._serial_port),
                (rf"DELETE {API}/zones/([^/]+)/instances/([^/]+)", self._delete),
                (rf"GET {API}/zones/([^/]+)/operations/([^/]+)", self._get_operation),
                (rf"POST {API}/zones/([^/]+)/operations/([^/]+)/wait", self._get_operation),
            ):
                match = re.fullmatch(pattern, f"{method} {path}")
                if match is not None:
                    if match[1] != PROJECT:
                        return 404, _error(404, "notFound")
                    return handle(*match.groups()[1:], query=query, body=body)
        return 404, _error(404, "notFound")

    def _machine_types(self, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        match = re.fullmatch(r'name = "([^"]+)"', query["filter"][0])
        assert match is not None, query
        kinds = (
            [{"name": match[1]}] if match[1] in ("g2-standard-4", "a3-highgpu-8g", "a3-ultragpu-8g") else []
        )
        return self._page({f"zones/{zone}": {"machineTypes": kinds} for zone in ZONES}, query)

    def _insert(self, zone: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if zone not in ZONES:
            return 404, _error(404, "notFound")
        request = query["requestId"][0]
        if request in self.requests:
            return 200, self.operations[self.requests[request]]
        self.bodies.append(body)
        name = body["name"]
        if "/a3-" in body["machineType"] and any(_disk_type(disk) == "pd-standard" for disk in body["disks"]):
            return 400, _error(400, "invalid")
        if (zone, name) in self.instances:
            return 409, _error(409, "alreadyExists")
        code = self.errors.get(zone)
        if code is None and self.stock.get(zone, 1) < 1:
            code = "ZONE_RESOURCE_POOL_EXHAUSTED"
        operation = self._operation(zone, "insert", name, error=code)
        self.requests[request] = operation["name"]
        if code is None:
            if zone in self.stock:
                self.stock[zone] -= 1
            self._start(zone, name, body)
        return 200, operation

    def _start(self, zone: str, name: str, body: dict[str, Any]) -> None:
        link = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}"
        number = len(self.instances) + 2
        for interface in body.get("networkInterfaces", []):
            interface["networkIP"] = f"10.128.0.{number}"
            for access in interface.get("accessConfigs", []):
                access["natIP"] = f"203.0.113.{number}"
        for disk in body["disks"]:
            disk["source"] = f"{link}/disks/{name}"
        self.instances[zone, name] = {**body, "status": "RUNNING", "zone": link, "creationTimestamp": _now()}
        if self.hypervisor is not None:
            items = {item["key"]: item["value"] for item in body["metadata"]["items"]}
            self.hypervisor.boot(body["labels"]["rlboost-machine"], items["startup-script"])

    def _insert_image(self, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if query.get("forceCreate") != ["true"]:  # as Google refuses the disk of a machine that runs
            return 400, _error(400, "resourceInUseByAnotherResource")
        self.image_bodies.append(body)
        self.images[body["name"]] = {
            **body, "status": "READY", "diskSizeGb": "60", "creationTimestamp": _now(),
        }  # fmt: skip
        return 200, self._operation("", "insert", body["name"])

    def _list_images(self, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        assert query["filter"] == ["labels.rlboost-image:*"]
        found = [each for each in self.images.values() if "rlboost-image" in each.get("labels", {})]
        return 200, {"items": found}

    def _get_image(self, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        return (200, self.images[name]) if name in self.images else (404, _error(404, "notFound"))

    def _delete_image(self, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        del self.images[name]
        return 200, self._operation("", "delete", name)

    def _get_global_operation(self, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        return 200, self.operations[name]

    def _get(self, zone: str, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        found = self.instances.get((zone, name))
        return (404, _error(404, "notFound")) if found is None else (200, found)

    def _serial_port(self, zone: str, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if (zone, name) not in self.instances:
            return 404, _error(404, "notFound")
        start = int(query["start"][0])
        assert (query["port"], start < 0) == (["1"], True)
        return 200, {"contents": self.console[start:], "start": str(max(0, len(self.console) + start))}

    def _delete(self, zone: str, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        instance = self.instances.get((zone, name))
        if instance is None:
            return 404, _error(404, "notFound")
        if instance["status"] != "STOPPING":
            instance["status"] = "STOPPING"
            if self.hypervisor is not None:
                self.hypervisor.stop(instance["labels"]["rlboost-machine"])
            timer = threading.Timer(self.delete_s, self._remove, (zone, name))
            timer.daemon = True
            timer.start()
        return 200, self._operation(zone, "delete", name)

    def _remove(self, zone: str, name: str) -> None:
        with self.lock:
            instance = self.instances.pop((zone, name), None)
        if instance is not None and self.hypervisor is not None:
            self.hypervisor.stop(instance["labels"]["rlboost-machine"])

    def _get_operation(self, zone: str, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        return 200, self.operations[name]

    def _hold(self, operation: str) -> None:
        """Return once the operation has ended, as Google's `wait` does."""
        deadline = time.monotonic() + HOLDS_S
        while time.monotonic() < deadline and not self._has_ended(operation):
            time.sleep(0.01)

    def _has_ended(self, operation: str) -> bool:
        return not self.never_done and time.monotonic() >= self.ends[operation]

    def _list(self, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        condition = query["filter"][0]
        scopes: dict[str, Any] = {
            f"zones/{zone}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}} for zone in ZONES
        }
        for (zone, _), instance in self.instances.items():
            if _labels_match(instance["labels"], condition):
                scope = scopes[f"zones/{zone}"]
                scope.setdefault("instances", []).append(instance)
        return self._page(scopes, query)

    def _list_operations(self, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        match = re.fullmatch(r'targetLink eq "(.+)"', query["filter"][0])
        assert match is not None, "a regular expression cannot be combined with anything"
        scopes: dict[str, Any] = {f"zones/{zone}": {} for zone in ZONES}
        for operation in self.operations.values():
            if re.fullmatch(match[1], operation["targetLink"]):
                zone = operation["zone"].rpartition("/")[2]
                scopes[f"zones/{zone}"].setdefault("operations", []).append(operation)
        return self._page(scopes, query)

    def _page(self, scopes: dict[str, Any], query: dict[str, list[str]]) -> tuple[int, Any]:
        start = int(query.get("pageToken", ["0"])[0])
        page: dict[str, Any] = {"items": dict(list(scopes.items())[start : start + 2])}
        if start + 2 < len(scopes):
            page["nextPageToken"] = str(start + 2)
        return 200, page

    def _operation(
        self, zone: str, kind: str, target: str, *, error: str | None = None, done: bool = False
    ) -> dict[str, Any]:
        link = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/zones/{zone}"
        operation: dict[str, Any] = {
            "id": str(next(self.number)),
            "name": f"operation-{next(self.number)}",
            "operationType": kind,
            "status": "DONE" if done else "RUNNING",
            "zone": link,
            "targetLink": f"{link}/instances/{target}",
            "insertTime": _now(),
        }
        if error is not None:
            operation["error"] = {"errors": [{"code": error, "message": f"{zone}: said by the fake"}]}
            operation["httpErrorStatusCode"] = 503
        self.operations[operation["name"]] = operation
        self.ends[operation["name"]] = time.monotonic() + (0 if done else self.operation_s)
        return operation


def _disk_type(disk: dict[str, Any]) -> str:
    """Return the kind of a disk to be made: where none is named, what Google takes."""
    return str(disk["initializeParams"].get("diskType", "pd-standard")).rpartition("/")[2]


def _labels_match(labels: dict[str, str], condition: str) -> bool:
    for term in condition.split(" AND "):
        present = re.fullmatch(r"labels\.([\w-]+):\*", term)
        equal = re.fullmatch(r'labels\.([\w-]+) = "([^"]*)"', term)
        assert present or equal, term
        if present and present[1] not in labels:
            return False
        if equal and labels.get(equal[1]) != equal[2]:
            return False
    return True


def _now() -> str:
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")


def _error(status: int, reason: str) -> dict[str, Any]:
    detail = {"reason": reason, "message": f"said by the fake: {reason}", "domain": "global"}
    return {"error": {"code": status, "message": detail["message"], "errors": [detail]}}


@contextmanager
def fake_gce(folder: Path | None = None) -> Iterator[FakeGce]:
    """Serve Compute Engine on loopback until the end; with `folder`, machines run there."""
    fake = FakeGce()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            status, answer = fake.answer(self.command, parts.path, parse_qs(parts.query), body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    if folder is not None:
        fake.hypervisor = Hypervisor(folder, fake.powered_off)
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        if fake.hypervisor is not None:
            fake.hypervisor.close()
