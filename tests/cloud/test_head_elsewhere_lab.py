"""A head elsewhere with nothing of ours on it: a namespace machine, on which a Python 3.11, our requirements
and our wheel are installed over SSH; it trains, with the laptop's commands only looking."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from cloudlab import catalogue
from cloudlab.client import Lab

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200, func_only=True)]
UP_S = 600.0
VENV = "/home/ubuntu/.rlboost/venv"
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


def test_a_bare_machine_becomes_a_head_and_trains(lab: Lab, account: dict[str, str], cloud_cli: Cli) -> None:
    ssh = Path(account["HOME"]) / ".ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "id_ed25519")], check=True)
    with rented(lab, (ssh / "id_ed25519.pub").read_text().strip()) as (machine, address):
        train_on(lab, machine, address, ssh, cloud_cli)


def train_on(lab: Lab, machine: str, address: str, ssh: Path, cloud_cli: Cli) -> None:
    lab.ask("shell", id=machine, script="rm -rf /home/ubuntu/.rlboost")  # the lab's image has it
    assert lab.ask("shell", id=machine, script=f"test -e {VENV} || echo bare") == "bare\n"
    with (ssh / "known_hosts").open("a") as known:  # what a person does who compares fingerprints
        subprocess.run(["ssh-keyscan", "-t", "ed25519", address], stdout=known, check=True)
    cloud_cli.environment.pop("SSH_AUTH_SOCK", None)
    trainer = {"infra": "ssh", "hosts": [f"ubuntu@{address}"]}
    job = cloud_cli.job(
        "bare", trainer=trainer, algorithm={"steps": 1}, rollout={"spot": {"max_instances": 1}}
    )
    began = time.monotonic()
    cloud_cli("up", job, timeout_s=UP_S)
    first_s = time.monotonic() - began
    assert lab.ask("shell", id=machine, script=f"{VENV}/bin/python --version").startswith("Python 3.11.")
    began = time.monotonic()
    cloud_cli("up", job, timeout_s=UP_S)
    print(f"up on a bare machine {first_s:.1f} s, again {time.monotonic() - began:.1f} s")
    cloud_cli("launch", job, "--yes", timeout_s=UP_S)
    assert cloud_cli.json("status", "bare")["state"] == "done"
    assert (cloud_cli.run_folder("bare").checkpoints / "model" / "model.safetensors").exists()
    assert cloud_cli.json("cost", "bare")["tokens_trained"] > 0
    left = lab.ask("shell", id=machine, script="pgrep -u ubuntu -af rlboost_runtime || echo nothing")
    assert left.strip() == "nothing", left
