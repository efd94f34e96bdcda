"""EC2's instances in our words, and what a launch template of ours says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rlboost_providers import tags
from rlboost_providers.aws_errors import code_of, explained
from rlboost_providers.base import MachineState

_STATES = {
    "pending": MachineState.STARTING,
    "running": MachineState.RUNNING,
    "stopping": MachineState.RUNNING,  # somebody stopped it by hand: there, though of no use
    "stopped": MachineState.RUNNING,
    "shutting-down": MachineState.GONE,  # no longer billed
    "terminated": MachineState.GONE,
}
_WHEN = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?: \w+)?\)")
RECLAIMED = "Server.SpotInstanceTermination"


@dataclass(frozen=True, slots=True)
class Machine:
    """One EC2 instance of ours."""

    run: str
    machine: str
    owner: str
    instance: str
    instance_type: str
    region: str
    zone: str
    is_spot: bool
    state: MachineState
    launched_at: float
    ended_at: float | None
    detail: str
    public_address: str
    private_address: str

    @property
    def is_alive(self) -> bool:
        """Whether it may cost something."""
        return self.state is not MachineState.GONE


def console_of(ec2: Any, region: str, instance: str) -> str:
    """Return what an instance wrote to its serial console, as far as EC2 has it: 64 KB at most; of machines
    of older kinds (not Nitro) only what was written some minutes ago."""
    with explained(f"read the console of {instance} in {region}"):
        try:
            answer = ec2.get_console_output(InstanceId=instance, Latest=True)
        except ec2.exceptions.ClientError as error:
            if code_of(error) != "UnsupportedOperation":
                raise
            answer = ec2.get_console_output(InstanceId=instance)
    return str(answer.get("Output") or "")


def list_machines(
    ec2: Any, region: str, *, run: str | None = None, machine: str | None = None, owner: str | None = None
) -> Iterator[Machine]:
    """Yield the region's instances with our tags; those that ended stay listed for about an hour."""
    wanted = {tags.RUN: run, tags.MACHINE: machine, tags.OWNER: owner}
    filters = [
        {"Name": f"tag:{tag}", "Values": [value]} for tag, value in wanted.items() if value is not None
    ]
    with explained(f"list the machines in {region}"):
        pages = ec2.get_paginator("describe_instances").paginate(
            Filters=filters or [{"Name": "tag-key", "Values": [tags.RUN]}]
        )
        found = [each for page in pages for group in page["Reservations"] for each in group["Instances"]]
    for instance in found:
        yield _machine(instance, region)


def template_data(
    image: str,
    user_data: str,
    marks: Mapping[str, str],
    *,
    group: str,
    device: str,
    disk_gb: int,
    instance_profile: str | None,
) -> dict[str, Any]:
    """Return the `LaunchTemplateData` of one machine; `user_data` in base64."""
    named = [{"Key": key, "Value": value} for key, value in marks.items()]
    named.append({"Key": "Name", "Value": f"rlboost {marks[tags.RUN]} {marks[tags.MACHINE]}"})
    data: dict[str, Any] = {
        "ImageId": image,
        "UserData": user_data,
        "SecurityGroupIds": [group],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,  # containers on the machine do not reach it
            "HttpEndpoint": "enabled",
            "InstanceMetadataTags": "disabled",
        },
        "BlockDeviceMappings": [
            {
                "DeviceName": device,
                "Ebs": {"VolumeSize": disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True},
            }
        ],
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": named},
            {"ResourceType": "volume", "Tags": named},
        ],
    }
    if instance_profile is not None:
        data["IamInstanceProfile"] = {"Name": instance_profile}
    return data


def _machine(instance: Mapping[str, Any], region: str) -> Machine:
    marks = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", [])}
    reason = instance.get("StateReason", {})
    state = _STATES.get(instance["State"]["Name"], MachineState.RUNNING)
    told = instance.get("StateTransitionReason", "")
    return Machine(
        run=marks.get(tags.RUN, ""),
        machine=marks.get(tags.MACHINE, ""),
        owner=marks.get(tags.OWNER, ""),
        instance=instance["InstanceId"],
        instance_type=instance["InstanceType"],
        region=region,
        zone=instance.get("Placement", {}).get("AvailabilityZone", region),
        is_spot=instance.get("InstanceLifecycle") == "spot",
        state=state,
        launched_at=instance["LaunchTime"].timestamp(),
        ended_at=_when(told) if state is MachineState.GONE else None,
        detail=_detail(state, reason.get("Code", "")),
        public_address=instance.get("PublicIpAddress", ""),
        private_address=instance.get("PrivateIpAddress", ""),
    )


def _detail(state: MachineState, code: str) -> str:
    if state is not MachineState.GONE:
        return ""
    return "reclaimed" if code.startswith(RECLAIMED) else code


def _when(told: str) -> float | None:
    """Return the time in `User initiated (2026-11-21 16:00:00 GMT)`, where there is one."""
    match = _WHEN.search(told)
    if match is None:
        return None
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
