"""Machines of the lab that a test rents from its EC2 as a person would, by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import boto3
from cloudlab import catalogue
from cloudlab.client import Lab

USER_DATA = "#cloud-config\nusers:\n  - name: ubuntu\n    ssh_authorized_keys:\n      - {key}\n"


@contextlib.contextmanager
def rented(lab: Lab, key: str) -> Iterator[tuple[str, str]]:
    """Rent a machine as a person would, by hand; yield its id and address once its sshd answers, end it."""
    ec2: Any = boto3.client("ec2", region_name="us-east-1", endpoint_url=lab.url)
    subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    (made,) = ec2.run_instances(
        ImageId=catalogue.IMAGE_ID,
        InstanceType="m6i.2xlarge",
        MinCount=1,
        MaxCount=1,
        SubnetId=subnet,
        UserData=USER_DATA.format(key=key),
    )["Instances"]
    try:
        yield made["InstanceId"], booted(lab, made["InstanceId"])
    finally:
        ec2.terminate_instances(InstanceIds=[made["InstanceId"]])


def booted(lab: Lab, machine: str) -> str:
    """Return the address of a machine once it has booted."""
    deadline = time.monotonic() + 90
    while True:
        for each in lab.machines():
            if each["id"] == machine and each["booted_at"] is not None:
                return str(each["address"])
        assert time.monotonic() < deadline, lab.machines()
        time.sleep(0.2)
