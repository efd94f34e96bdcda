"""The cloud: moto's EC2 API on loopback, and a hypervisor that gives each of its instances a machine.

A machine boots when the API says that its instance runs, and is destroyed when the API says that it is over;
`reclaim` does it the other way round, as a spot market does. `records` keeps when each was there, by the
host's clock: what a bill is checked against.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cloudlab import catalogue
from cloudlab.machine import Image, Machine, raise_bridge, sweep

LOOK_S = 0.1
LATE_S = 7.0
"""How long the API goes on listing a machine that was taken in silence: what its peers notice, they notice
first."""
ACCOUNT = "123456789012"
RECLAIMED = "Server.SpotInstanceTermination"
_POLICY = json.dumps({"Version": "2012-10-17", "Statement": []})


@dataclass(frozen=True)
class Record:
    """One instance, from its launch to its end."""

    id: str
    region: str
    zone: str
    instance_type: str
    is_spot: bool
    address: str
    tags: dict[str, str]
    launched_at: float
    role: str | None
    """Its instance profile: what its metadata service would give keys for."""
    is_bare: bool = False
    """Whether its image has no Python of the system's, and no cache."""
    booted_at: float | None = None
    ended_at: float | None = None
    problem: str = ""


class Cloud:
    """Serve the API and keep its machines. `stop` ends every machine."""

    def __init__(self, folder: Path, image: Image) -> None:
        self._folder, self._image = folder, image
        self.records: dict[str, Record] = {}
        self._machines: dict[str, Machine] = {}
        self._bare_left = 0
        self._has_registry = True
        self._images: dict[str, Path] = {}
        """By image id: what is /opt on machines of it."""
        self._refused: set[str] = set()
        self._taken: dict[str, float] = {}
        """Machines that are gone in silence, and when the API says so, by `time.monotonic`."""
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._hypervisor = threading.Thread(target=self._watch, name="hypervisor")

    def start(self, port: int) -> str:
        """Serve; return the API's address."""
        os.environ.update(_environment(self._folder))
        from moto.server import ThreadedMotoServer

        sweep(self._folder / "machines")
        raise_bridge()
        self._server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        url = f"http://{host}:{port}"
        _furnish(url)
        self._obey_refusals()
        self._keep_images()
        self._hypervisor.start()
        return url

    def stop(self) -> None:
        """End everything."""
        self._stop.set()
        self._hypervisor.join(timeout=60)
        for machine in self._machines.values():
            machine.destroy()
        sweep(self._folder / "machines")
        self._server.stop()

    # --- what tests may do ---------------------------------------------------------------------------------

    def machines(self) -> list[dict[str, Any]]:
        """Every instance that ever was, oldest first."""
        with self._lock:
            return [asdict(record) for record in self.records.values()]

    def refuse(self, regions: list[str]) -> None:
        """Have no spot capacity in these regions from now on, and have it in all others."""
        self._refused = set(regions)

    def bare_images(self, count: int) -> None:
        """Boot the next `count` spot machines from an image whose system has no Python, and no cache."""
        self._bare_left = count

    def cut_off_registry(self, is_cut: bool) -> None:
        """Have no package registry, and no uv, on machines that boot from now on."""
        self._has_registry = not is_cut

    def reclaim(self, id: str, how: str) -> None:
        """Take a spot machine: `reset` its peers' connections, or leave them in silence (`silent`)."""
        with self._lock:
            if how == "silent":
                self._machines[id].unplug()
                self._taken[id] = time.monotonic() + LATE_S
            self._machines[id].cut_power()
            if how != "silent":
                _terminate(self.records[id], RECLAIMED)

    def shell(self, id: str, script: str) -> str:
        """Run a script as root on a machine."""
        return self._machines[id].shell(script)

    def roles(self) -> dict[str, list[str]]:
        """The account's roles, with the policies that each has."""
        from moto.iam.models import iam_backends

        roles = iam_backends[ACCOUNT]["aws"].roles.values()
        return {role.name: [*role.managed_policies, *role.policies] for role in roles}

    # --- the hypervisor ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                for id in [id for id, due in self._taken.items() if time.monotonic() >= due]:
                    del self._taken[id]
                    _terminate(self.records[id], RECLAIMED)
                for region in catalogue.REGIONS:
                    for instance in _instances(region):
                        self._follow(region, instance)

    def _follow(self, region: str, instance: Any) -> None:
        state, record = instance.state, self.records.get(instance.id)
        if state == "running" and record is None:
            self._boot(region, instance)
        elif state == "running" and instance.id in self._machines and self._has_shut_down(instance.id):
            _terminate(self.records[instance.id], "Client.InstanceInitiatedShutdown")
        elif (
            record is not None
            and record.ended_at is None
            and state in ("terminated", "stopped", "shutting-down")
        ):
            machine = self._machines.pop(instance.id, None)
            if machine is not None:
                machine.destroy()
            self.records[instance.id] = replace(record, ended_at=time.time())

    def _has_shut_down(self, id: str) -> bool:
        return self._machines[id].is_off and id not in self._taken

    def _boot(self, region: str, instance: Any) -> None:
        record = _record(region, instance)
        is_bare = record.is_spot and self._bare_left > 0
        self._bare_left -= is_bare
        record = self.records[record.id] = replace(record, is_bare=is_bare)
        text = _user_data(instance.user_data)
        user, keys = _access(text)
        image = replace(
            self._image.bare if is_bare else self._image,
            has_registry=self._has_registry,
            opt=self._images.get(instance.image_id),
        )
        machine = Machine(
            record.id[-10:], record.address, user, keys, image,
            self._folder / "machines", text if text.startswith("#!") else "",
        )  # fmt: skip
        self._machines[record.id] = machine
        try:
            machine.boot()
        except (RuntimeError, OSError, subprocess.SubprocessError) as problem:
            self.records[record.id] = replace(record, problem=str(problem))
            return
        self.records[record.id] = replace(record, booted_at=time.time())

    def _keep_images(self) -> None:
        """Have CreateImage keep the machine's /opt, which is where our installations are."""
        from moto.ec2.models import EC2Backend

        create = EC2Backend.create_image

        def create_image(
            backend: Any, instance_id: str, *args: Any, tag_specifications: list[dict[str, Any]]
        ) -> Any:
            known = [each for each in tag_specifications if each["ResourceType"] == "image"]
            made = create(backend, instance_id, *args, tag_specifications=known)  # moto tags no snapshots
            target = self._folder / "images" / made.id
            target.mkdir(parents=True)
            inside = self._machines[instance_id].command("tar", "-c", "-C", "/opt", ".")
            with subprocess.Popen(["tar", "-x", "-C", str(target)], stdin=subprocess.PIPE) as taken:
                subprocess.run(inside, stdout=taken.stdin, timeout=120, check=True)
            self._images[made.id] = target
            return made

        EC2Backend.create_image = create_image

    def _obey_refusals(self) -> None:
        from moto.ec2.exceptions import EC2ClientError
        from moto.ec2.models import EC2Backend

        launch = EC2Backend.run_instances

        def run_instances(backend: Any, *args: Any, **options: Any) -> Any:
            if backend.region_name in self._refused:
                raise EC2ClientError(
                    "InsufficientInstanceCapacity",
                    "We currently do not have sufficient capacity in the Availability Zone you requested",
                )
            return launch(backend, *args, **options)

        EC2Backend.run_instances = run_instances


def _environment(folder: Path) -> dict[str, str]:
    images = folder / "images.json"
    images.write_text(catalogue.images_json())
    return {
        "MOTO_AMIS_PATH": str(images),
        "MOTO_EC2_LOAD_DEFAULT_AMIS": "true",
        "AWS_ACCESS_KEY_ID": "lab",
        "AWS_SECRET_ACCESS_KEY": "lab-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _furnish(url: str) -> None:
    """Make the account's network and role."""
    import boto3

    for number, region in enumerate(catalogue.REGIONS):
        ec2 = boto3.client("ec2", region_name=region, endpoint_url=url)
        base = 64 * number
        vpc = ec2.create_vpc(CidrBlock=f"10.231.{base}.0/18")["Vpc"]["VpcId"]
        ec2.create_tags(Resources=[vpc], Tags=[{"Key": "Name", "Value": catalogue.VPC}])
        for index, zone in enumerate(ec2.describe_availability_zones()["AvailabilityZones"]):
            network = f"10.231.{base + 4 * index}.0/22"
            ec2.create_subnet(VpcId=vpc, CidrBlock=network, AvailabilityZone=zone["ZoneName"])
    iam = boto3.client("iam", region_name="us-east-1", endpoint_url=url)
    iam.create_instance_profile(InstanceProfileName=catalogue.ROLE)
    iam.create_role(RoleName=catalogue.ROLE, AssumeRolePolicyDocument=_POLICY)
    iam.add_role_to_instance_profile(InstanceProfileName=catalogue.ROLE, RoleName=catalogue.ROLE)


def _instances(region: str) -> list[Any]:
    from moto.ec2.models import ec2_backends

    try:
        return [
            i for r in list(ec2_backends[ACCOUNT][region].reservations.values()) for i in list(r.instances)
        ]
    except RuntimeError:  # changed while we looked
        return []


def _terminate(record: Record, reason: str) -> None:
    from moto.ec2.models import ec2_backends
    from moto.ec2.models.instances import StateReason

    instance = ec2_backends[ACCOUNT][record.region].get_instance(record.id)
    instance.terminate()
    instance.state_reason = StateReason(f"{reason}: Instance terminated", reason)


def _record(region: str, instance: Any) -> Record:
    return Record(
        id=instance.id,
        region=region,
        zone=instance.placement.zone,
        instance_type=instance.instance_type,
        is_spot=instance.lifecycle == "spot",
        address=instance.private_ip,
        tags={tag["key"]: tag["value"] for tag in instance.get_tags()},
        launched_at=time.time(),
        role=_role(region, instance.id),
    )


def _role(region: str, id: str) -> str | None:
    from moto.ec2.models import ec2_backends

    associations = ec2_backends[ACCOUNT][region].iam_instance_profile_associations.values()
    return next((a.iam_instance_profile.name for a in associations if a.instance.id == id), None)


def _user_data(user_data: Any) -> str:
    """Return the text that an instance was given, which moto keeps as it came."""
    text = "\n".join(user_data) if isinstance(user_data, list) else str(user_data or "")
    if text.startswith("#") or "ssh-" in text:
        return text
    return base64.b64decode(text).decode(errors="replace")


def _access(text: str) -> tuple[str, str]:
    """Return user name and public keys out of cloud-init's user data."""
    user = re.search(r"- name: (\S+)", text)
    return (user.group(1) if user else "ubuntu"), "\n".join(re.findall(r"(ssh-\S+ \S+.*)", text))
