"""A whole run on a machine bought straight from EC2: nothing is in its image, and it only dials out."""

from __future__ import annotations

import time
from typing import Any

import pytest
from cloudlab.client import Lab
from cloudlab.machine import GATEWAY

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900, func_only=True)]
UP_S = 600.0
"""From the wish for a machine to its agent: boot, our installation, on two busy cores."""
BILL_SLACK_S = 10.0

JOB: dict[str, Any] = {
    "algorithm": {"steps": 4},
    "trainer": {"address": GATEWAY, "allow_cpu": True, "local_engines": 1},
    "rollout": {
        "spot": {
            "min_instances": 1,
            "max_instances": 1,
            "any_of": [{"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct"}],
        }
    },
}


def test_a_machine_from_ec2_itself_installs_the_runtime_serves_and_goes(lab: Lab, cloud_cli: Cli) -> None:
    lab.ask("refuse", regions=[])
    before = len(lab.machines())
    job = cloud_cli.job("direct", **JOB)
    cloud_cli("up", job, "--yes")
    began = time.time()
    try:
        cloud_cli.wait("direct", lambda s: any(i["pool"] == "spot" for i in s["instances"]), UP_S, 0.5)
    except AssertionError:
        for machine in lab.machines()[before:]:
            print(lab.ask("shell", id=machine["id"], script="cat /run/user-data.log /opt/rlboost/*.log"))
        raise
    print(f"joined {time.time() - began:.1f} s after `up`")
    cloud_cli("launch", job, "--yes", "--detach")
    outcome = cloud_cli.wait_outcome("direct", UP_S)
    assert outcome["state"] == "done", outcome
    deadline = time.monotonic() + 10  # the lab takes a moment to see what its API was told
    while any(m["ended_at"] is None for m in lab.machines()):
        assert time.monotonic() < deadline, f"something is left: {lab.machines()}"
        time.sleep(0.2)
    machines = lab.machines()[before:]
    assert all(m["role"] is None for m in machines), "no identity: it cannot ask its cloud for anything"
    cost = cloud_cli.json("cost", "direct")
    (billed,) = [m for m in cost["machines"] if m["pool"] == "spot"]
    (there,) = machines
    assert billed["billed_s"] == pytest.approx(there["ended_at"] - there["launched_at"], abs=BILL_SLACK_S)
