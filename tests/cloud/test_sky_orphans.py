"""What SkyPilot goes on with when everybody who knew of it is dead: `rlboost gc` finds and ends it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cloudlab.client import Lab
from cloudlab.machine import GATEWAY

from rlboost_runtime.processes import kill_tagged
from tests.cloud.conftest import members_of, skypilot_sessions
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900, func_only=True)]
START_S = 300.0

JOB: dict[str, Any] = {
    "trainer": {"address": GATEWAY, "allow_cpu": True},
    "rollout": {
        "spot": {
            "min_instances": 1,
            "max_instances": 1,
            "any_of": [{"infra": "aws", "accelerators": "A10G:1"}],
        }
    },
}


def until(ready: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.3)


def test_a_machine_of_a_run_that_nobody_remembers_is_found_and_ended(
    lab: Lab, sky_user: dict[str, str], cloud_cli: Cli
) -> None:
    cloud_cli.environment |= {**sky_user, "RLBOOST_HOME": str(cloud_cli.home)}
    lab.ask("refuse", regions=[])
    before = len(lab.machines())
    cloud_cli("up", cloud_cli.job("lost", **JOB), "--yes")
    until(lambda: len(lab.machines()) > before, START_S, "a machine is being launched")
    sessions = skypilot_sessions(Path(sky_user["HOME"]))
    run = cloud_cli.run_folder("lost").path
    kill_tagged(run)
    shutil.rmtree(run)
    assert members_of(sessions), "the API server is not of the run: it goes on with the launch"

    found = cloud_cli.json("gc", "--cloud", "skypilot", "--dry-run")["machines"]
    (living,) = [m["tags"]["rlboost-machine"] for m in lab.machines() if m["ended_at"] is None]
    assert [(m["run"], m["machine"], m["to_end"]) for m in found] == [("lost", living, True)]
    assert found[0]["why"] == "its run is unknown here"
    cloud_cli("gc", "--cloud", "skypilot", "--yes", timeout_s=START_S)
    until(lambda: all(m["ended_at"] for m in lab.machines()), 30, "nothing is left in the cloud")
    assert cloud_cli.json("gc", "--cloud", "skypilot", "--dry-run")["machines"] == []
    until(lambda: not members_of(sessions), 120, "SkyPilot's API server has ended with its executors")
