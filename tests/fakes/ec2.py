"""EC2 as an HTTP service on loopback: moto's, with what moto lacks.

Spot prices that move and reclaim, capacity by zone, CreateFleet that keeps to the overrides' maximum prices
and to its client token, refusals to order (throttling, expired credentials, a quota of zero), and machines
that really run their user data.
"""

from __future__ import annotations

import base64
import functools
import gzip
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock
from wsgiref.types import StartResponse, WSGIEnvironment

os.environ["MOTO_AMIS_PATH"] = str(Path(__file__).with_name("images.json"))  # before moto is loaded

import boto3
from botocore.config import Config
from moto import settings
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend, ec2_backends
from moto.ec2.models.instances import StateReason
from moto.ec2.responses.fleets import Fleets
from moto.ec2.responses.spot_instances import SpotInstances
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.fakes.hypervisor import Hypervisor

ACCOUNT = "123456789012"
IMAGE = "ami-12c6146b"
REGION = "us-east-2"

_original_create_fleet = Fleets.create_fleet
_error = """<?xml version="1.0" encoding="UTF-8"?>
<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>
<RequestID>fake</RequestID></Response>"""

_REGIONS = """<DescribeRegionsResponse><regionInfo>
<item><regionName>us-east-2</regionName></item><item><regionName>us-west-2</regionName></item>
</regionInfo></DescribeRegionsResponse>"""  # moto's seventeen take a client each


@dataclass
class Refusal:
    """One answer of the API instead of the right one, to the first call of `action` ("" for any)."""

    action: str
    code: str
    status: int = 400
    message: str = "said by a test"
    times: int = 1
    region: str = ""
    """Where alone it is said; empty: everywhere."""


@dataclass
class FakeEc2:
    """One region's market; the other regions are moto's own."""

    url: str
    hypervisor: Hypervisor | None
    prices: dict[tuple[str, str], float] = field(default_factory=dict)
    """Dollars per hour by machine type and zone."""
    capacity: dict[str, int] = field(default_factory=dict)
    """Machines that a zone can still give; zones that are not named give any number."""
    fleet_errors: dict[str, str] = field(default_factory=dict)
    """By zone: why CreateFleet gives nothing there."""
    refusals: deque[Refusal] = field(default_factory=deque)
    calls: list[str] = field(default_factory=list)
    reservations: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Capacity reservations by id, as DescribeCapacityReservations tells of them."""
    fleet_kinds: list[str] = field(default_factory=list)
    """What kind of capacity each CreateFleet asked for."""
    templates: list[dict[str, Any]] = field(default_factory=list)
    """What each launch template said."""
    bids: dict[str, float | None] = field(default_factory=dict)
    fleets: dict[str, tuple[object, dict[str, Any]]] = field(default_factory=dict)
    lists_lag: bool = False
    """DescribeInstances says nothing, as EC2's does for a while after a launch."""
    console: str = ""
    """What machines write to their serial consoles."""
    old_kinds: bool = False
    """Machine types are not Nitro's: the latest of a console is not to be had."""
    lose_answers: int = 0
    """So many CreateFleet answers are lost on their way: the machine is there, the caller hears a 503."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def client(self, region: str) -> Any:
        """Return a client of the service, made from a session that all tests share: one takes a second."""
        config = Config(retries={"mode": "standard", "max_attempts": 4}, connect_timeout=5, read_timeout=25)
        return _session().client("ec2", region_name=region, endpoint_url=self.url, config=config)

    def sign_in(self, patch: Any) -> None:
        """Let boto3 of this process find the service, with credentials that it takes."""
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_ENDPOINT_URL", self.url)
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")

    @property
    def backend(self) -> Any:
        return ec2_backends[ACCOUNT][REGION]

    def instances(self, *, alive: bool = True) -> list[Any]:
        found = [i for r in self.backend.reservations.values() for i in r.instances]
        return [i for i in found if not alive or i._state.name == "running"]

    def machine(self, name: str) -> Any:
        [found] = [i for i in self.instances(alive=False) if _tag(i, "rlboost-machine") == name]
        return found

    def set_price(self, instance_type: str, zone: str, usd: float) -> None:
        """Move a price; machines whose bid it passes are taken, as EC2 does."""
        with self.lock:
            self.prices[instance_type, zone] = usd
            for instance in self.instances():
                bid = self.bids.get(instance.id)
                if bid is not None and instance.subnet_id in self.backend.subnets[zone] and usd > bid:
                    self.reclaim(instance)

    def reclaim(self, instance: Any) -> None:
        instance.terminate()
        code = "Server.SpotInstanceTermination"
        instance.state_reason = StateReason(f"{code}: Spot instance termination", code)
        instance._reason = code
        self._stop(instance)

    def powered_off(self, name: str) -> None:
        for instance in self.instances():
            if _tag(instance, "rlboost-machine") == name:
                instance.terminate()
                self._stop(instance)

    def create_fleet(self, response: Any) -> ActionResult:
        with self.lock:
            token = response._get_param("ClientToken")
            configs = response._get_param("LaunchTemplateConfigs", [])
            if token in self.fleets:
                parameters, result = self.fleets[token]
                if parameters != configs:
                    raise EC2ClientError("IdempotentParameterMismatch", "the token was used with others")
                return ActionResult(result)
            (config,) = configs
            name = config["LaunchTemplateSpecification"]["LaunchTemplateName"]
            template = self.backend.get_launch_template_by_name(name)
            self.templates.append(template.get_version(1).data)
            chosen, errors = self._choose(config["Overrides"])
            result = {"FleetId": "fleet-none", "Instances": [], "Errors": errors}
            if chosen is not None:
                result = self._launch(response, config, chosen, template)
            self.fleets[token] = (configs, result)
            return ActionResult(result)

    def _choose(self, overrides: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        errors, fitting = [], []
        zones = sorted({zone for _, zone in self.prices})
        every = [
            o if "AvailabilityZone" in o else {**o, "AvailabilityZone": z}
            for o in overrides
            for z in zones
            if "SubnetId" not in o or o["SubnetId"] in self.backend.subnets[z]
        ]
        for override in every:
            zone = override["AvailabilityZone"]
            price = self.prices.get((override["InstanceType"], zone))
            code = self.fleet_errors.get(zone)
            if code is None and self.capacity.get(zone, 1) < 1:
                code = "InsufficientInstanceCapacity"
            if code is None and (price is None or price > float(override.get("MaxPrice", "inf"))):
                code = "SpotMaxPriceTooLow"
            if code is None:
                fitting.append((price, override))
            else:
                errors.append({"ErrorCode": code, "ErrorMessage": f"{zone}: said by the fake"})
        best = min(fitting, key=lambda each: each[0] or 0.0, default=None)
        return (None if best is None else best[1]), errors

    def _launch(self, response: Any, config: Any, override: Any, template: Any) -> dict[str, Any]:
        zone = override["AvailabilityZone"]
        subnet = next(iter(self.backend.subnets[zone]))
        one = {**config, "Overrides": [{"InstanceType": override["InstanceType"], "SubnetId": subnet}]}
        ask = response._get_param
        target = ask("TargetCapacitySpecification", {})
        if target["DefaultTargetCapacityType"] == "capacity-block":  # moto knows none
            target |= {"DefaultTargetCapacityType": "on-demand"}
        told = {"LaunchTemplateConfigs": [one], "TargetCapacitySpecification": target}
        response._get_param = lambda name, *a, **k: told[name] if name in told else ask(name, *a, **k)
        result: dict[str, Any] = _original_create_fleet(response).result
        [instance] = [i for i in self.instances() if i.id == result["Instances"][0]["InstanceIds"][0]]
        result["Instances"][0] |= {
            "InstanceType": override["InstanceType"],
            "LaunchTemplateAndOverrides": {"Overrides": override},
        }
        self.bids[instance.id] = float(override["MaxPrice"]) if "MaxPrice" in override else None
        if zone in self.capacity:
            self.capacity[zone] -= 1
        if self.hypervisor is not None:
            user_data = base64.b64decode(str(template.get_version(1).data["UserData"])).decode()
            self.hypervisor.boot(_tag(instance, "rlboost-machine"), user_data)
        return result

    def _stop(self, instance: Any) -> None:
        if self.hypervisor is not None:
            self.hypervisor.stop(_tag(instance, "rlboost-machine"))

    def _history(self, response: Any) -> ActionResult:
        wanted = response._get_param("InstanceTypes", [])
        now = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        rows = [
            {
                "InstanceType": kind,
                "AvailabilityZone": zone,
                "SpotPrice": f"{usd:.6f}",
                "ProductDescription": "Linux/UNIX",
                "Timestamp": now,
            }
            for (kind, zone), usd in self.prices.items()
            if kind in wanted
        ]
        return ActionResult({"SpotPriceHistory": rows})

    def _answer(self, app: Any, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        environ["wsgi.input"] = _Body(body)
        text = (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body).decode()
        match = re.search(r"(?:^|&)Action=(\w+)", text)
        action = match[1] if match else ""
        self.calls.append(action)
        refusal = self._refusal(action, environ.get("HTTP_AUTHORIZATION", ""))
        if refusal is not None:
            start(f"{refusal.status} refused", [("Content-Type", "text/xml")])
            return [_error.format(code=refusal.code, message=refusal.message).encode()]
        if action == "GetConsoleOutput":
            return self._console(text, start)
        if action == "DescribeCapacityReservations":
            return self._capacity_reservations(text, start)
        if action == "CreateFleet":
            self.fleet_kinds += re.findall(r"DefaultTargetCapacityType=([a-z-]+)", text)
        if action == "DescribeRegions":
            start("200 OK", [("Content-Type", "text/xml")])
            return [_REGIONS.encode()]
        if self.lists_lag and action == "DescribeInstances":
            start("200 OK", [("Content-Type", "text/xml")])
            return [b"<DescribeInstancesResponse><reservationSet/></DescribeInstancesResponse>"]
        if action == "CreateFleet" and self.lose_answers:
            self.lose_answers -= 1
            list(app(environ, lambda *_: None))
            start("503 lost", [("Content-Type", "text/xml")])
            return [_error.format(code="Unavailable", message="the answer was lost").encode()]
        answer: Iterable[bytes] = app(environ, start)
        if action == "TerminateInstances":
            for instance in self.instances(alive=False):
                if instance._state.name == "terminated":
                    self._stop(instance)
        return answer

    def _capacity_reservations(self, text: str, start: StartResponse) -> Iterable[bytes]:
        name = re.findall(r"CapacityReservationId\.1=([\w-]+)", text)[0]
        if name not in self.reservations:
            start("400 unknown", [("Content-Type", "text/xml")])
            code = "InvalidCapacityReservationId.NotFound"
            return [_error.format(code=code, message=f"{name} does not exist").encode()]
        told = {"capacityReservationId": name, **self.reservations[name]}
        row = "".join(f"<{key}>{value}</{key}>" for key, value in told.items())
        start("200 OK", [("Content-Type", "text/xml")])
        return [
            "<DescribeCapacityReservationsResponse><capacityReservationSet><item>"
            f"{row}</item></capacityReservationSet></DescribeCapacityReservationsResponse>".encode()
        ]

    def _console(self, text: str, start: StartResponse) -> Iterable[bytes]:
        if self.old_kinds and "Latest=true" in text:
            start("400 refused", [("Content-Type", "text/xml")])
            return [_error.format(code="UnsupportedOperation", message="not of this type").encode()]
        start("200 OK", [("Content-Type", "text/xml")])
        output = base64.b64encode(self.console.encode()).decode()
        return [f"<GetConsoleOutputResponse><output>{output}</output></GetConsoleOutputResponse>".encode()]

    def _refusal(self, action: str, signed: str) -> Refusal | None:
        with self.lock:
            for refusal in self.refusals:
                if refusal.action in ("", action) and refusal.region in signed:
                    refusal.times -= 1
                    if refusal.times < 1:
                        self.refusals.remove(refusal)
                    return refusal
        return None


@functools.cache
def _session() -> Any:
    return boto3.session.Session(aws_access_key_id="testing", aws_secret_access_key="testing")


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int = -1) -> bytes:
        size = len(self._data) if size is None or size < 0 else size
        taken, self._data = self._data[:size], self._data[size:]
        return taken


def _tag(instance: Any, key: str) -> str:
    return next((tag["value"] for tag in instance.get_tags() if tag["key"] == key), "")


_original_create_image = EC2Backend.create_image


def create_image(
    backend: Any, instance_id: str, name: str, description: str, tag_specifications: list[dict[str, Any]]
) -> Any:
    """CreateImage with tags for its snapshots, which moto refuses."""
    of_image = [each for each in tag_specifications if each["ResourceType"] == "image"]
    image = _original_create_image(backend, instance_id, name, description, of_image)
    for each in tag_specifications:
        if each["ResourceType"] == "snapshot":
            for tag in each["Tags"]:
                image.ebs_snapshot.add_tag(tag["Key"], tag["Value"])
    return image


@contextmanager
def fake_ec2(folder: Path | None = None) -> Iterator[FakeEc2]:
    """Serve EC2 on loopback until the end; with `folder`, machines run there."""
    for region in (REGION, "us-west-2"):
        ec2_backends[ACCOUNT][region].reset()
    settings.MOTO_ACCOUNT_ID = ACCOUNT
    fake = FakeEc2("", None)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1",
        0,
        lambda environ, start: fake._answer(app, environ, start),
        threaded=True,
        request_handler=_Quiet,
    )
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    if folder is not None:
        fake.hypervisor = Hypervisor(folder, fake.powered_off)
    try:
        with (
            mock.patch.object(Fleets, "create_fleet", _method(fake.create_fleet)),
            mock.patch.object(SpotInstances, "describe_spot_price_history", _method(fake._history)),
            mock.patch.object(EC2Backend, "create_image", create_image),
        ):
            yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        if fake.hypervisor is not None:
            fake.hypervisor.close()


def _method(function: Any) -> Any:
    return lambda response: function(response)
