"""A whole run on spot machines of the real SkyPilot: taken, missing, replaced elsewhere, ended, paid for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cloudlab.catalogue import WARES
from cloudlab.client import Lab
from cloudlab.cloud import LATE_S
from cloudlab.machine import GATEWAY
from machine_secrets import check_credentials

from rlboost_cli.views.run_view import PHASES, boot_times
from rlboost_runtime.protocol.status import read_status
from rlboost_runtime.run.credentials import make_credential
from tests.cloud.conftest import members_of, skypilot_sessions
from tests.e2e.conftest import Cli

pytestmark = pytest.mark.timeout(2400, func_only=True)  # the image may have to be made first
UP_S = 900.0
"""From the wish for a machine to its agent, with SkyPilot's and our installation, on two busy cores."""
BILL_SLACK_S = 20.0
"""Most that is billed beyond EC2's clock of an instance, where SkyPilot is as quick as on idle cores: from
its word that it asks for one to its word that it is gone."""
IDLE_UP_S = 200.0
"""What it takes there until three machines have joined: a measure of how busy this host is."""


JOB: dict[str, Any] = {
    "algorithm": {"steps": 3, "prompts_per_step": 12, "group_size": 4, "max_response_tokens": 32},
    "reward": "gate.py:score",
    "reward_sandbox": "off",  # it waits for a file of the test
    "reward_timeout_s": UP_S,
    "reward_processes": 1,
    "trainer": {"address": GATEWAY, "allow_cpu": True, "price_usd_per_hour": 1.006, "local_engines": 1},
    "rollout": {
        "engine_args": {"max_running": 4, "tokens_per_s_per_response": 8},
        "spot": {
            "min_instances": 3,
            "max_instances": 3,
            "any_of": [{"infra": "aws", "accelerators": "A10G:1"}],
        },
    },
}
GATE = """\
import time
from pathlib import Path

scored = 0

def score(response, row):
    global scored
    scored += 1
    while scored > int(Path({path!r}).read_text() or 0):
        time.sleep(0.1)
    return 1 / (1 + len(response))
"""
"""A reward that waits for the test: a step ends when it may, so that the run lasts as long as it has to."""
RESPONSES = 48
"""Of one step."""


class Clock:
    """Says when what was reached."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        print(f"{self.seconds:6.1f} s  {what}", flush=True)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began


def living(lab: Lab) -> list[dict[str, Any]]:
    return [m for m in lab.machines() if m["ended_at"] is None]


def num_joined(status: dict[str, Any]) -> int:
    return sum(i["pool"] == "spot" for i in status["instances"])


def serving(status: dict[str, Any]) -> set[str]:
    """Machines of spot instances that are in the run's service."""
    return {
        i["machine"] for i in status["instances"] if i["pool"] == "spot" and i["policy_version"] is not None
    }


def working(status: dict[str, Any]) -> set[str]:
    """Machines whose engines hold responses."""
    return {i["machine"] for i in status["instances"] if i["in_flight"]}


def until(ready: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@contextmanager
def told_by_machines(lab: Lab, began: int) -> Iterator[None]:
    """Where a wait fails: print what the machines say that run."""
    try:
        yield
    except AssertionError:
        for machine in lab.machines()[began:]:
            if machine["ended_at"] is None:
                logs = "/home/ubuntu/.rlboost/*.log /home/ubuntu/sky_logs/*/*.log"
                print(machine["id"], lab.ask("shell", id=machine["id"], script=f"tail -n 30 {logs}; ps faux"))
        raise


def record(lab: Lab, machine: str) -> dict[str, Any]:
    (found,) = [m for m in lab.machines() if m["tags"].get("rlboost-machine") == machine]
    return found


def test_a_run_loses_machines_finds_others_ends_and_is_billed_to_the_second(
    lab: Lab, sky_user: dict[str, str], cloud_cli: Cli
) -> None:
    cloud_cli.environment |= {**sky_user, "RLBOOST_HOME": str(cloud_cli.home)}
    lab.ask("refuse", regions=[])
    began = len(lab.machines())
    lab.ask("bare_images", count=1)
    clock = Clock()
    gate = cloud_cli.home / "gate"
    gate.write_text("0")
    (cloud_cli.home / "gate.py").write_text(GATE.format(path=str(gate)))
    job = cloud_cli.job("cloud", **JOB)
    cloud_cli("up", job, "--yes")  # machines come, and wait for the trainer
    with told_by_machines(lab, began):
        cloud_cli.wait("cloud", lambda s: num_joined(s) == 3, UP_S, 1.0)
    clock.say("three machines have joined")
    slowness = max(1.0, clock.seconds / IDLE_UP_S)
    cloud_cli("launch", job, "--yes", "--detach")  # the laptop may go now: nothing of it is asked any more

    def spots() -> list[dict[str, Any]]:
        return lab.machines()[began:]

    (bare,) = [m for m in spots() if m["is_bare"]]
    token = cloud_cli.run_folder("cloud").token.read_text().strip()
    check_credentials(lab, bare["id"], make_credential(token, bare["tags"]["rlboost-machine"]), token)
    spot_machines = {m["tags"]["rlboost-machine"] for m in spots()}
    cloud_cli.wait("cloud", lambda s: serving(s) >= spot_machines, UP_S)
    clock.say("all of them serve")
    gate.write_text(str(RESPONSES))
    cloud_cli.wait("cloud", lambda s: working(s) >= spot_machines, UP_S)
    victims = sorted(spot_machines - {bare["tags"]["rlboost-machine"]})
    assert {m["region"] for m in spots()} == {"us-west-2"}, "the cheapest region"
    clock.say("all of them work")

    lab.ask("refuse", regions=["us-west-2"])
    lab.ask("reclaim", id=record(lab, victims[0])["id"], how="reset")
    lab.ask("reclaim", id=record(lab, victims[1])["id"], how="silent")
    gone = cloud_cli.wait("cloud", lambda s: s["preemptions"]["reset"] and s["preemptions"]["silent"], 90.0)
    assert gone["state"] in ("rollout", "training")
    cloud_cli.wait("cloud", lambda s: s["responses"]["migrated"] > 0, 30.0)
    clock.say("two were taken, and their responses go on elsewhere")

    with told_by_machines(lab, began):
        replaced = cloud_cli.wait("cloud", lambda s: len(serving(s) - set(victims)) == 3, UP_S, 1.0)
    late = [m for m in spots() if m["tags"]["rlboost-machine"] not in spot_machines]
    late_names = {m["tags"]["rlboost-machine"] for m in late}
    assert {m["region"] for m in late} == {"us-east-1"}, "where there still was capacity"
    assert {m["price_usd_per_hour"] for m in replaced["machines"] if m["state"] != "gone"} >= {0.41}
    clock.say("others serve in their place")
    assert cloud_cli.json("status", "cloud")["run"] == "cloud"
    assert cloud_cli.json("cost", "cloud")["total_usd"] > 0

    sessions = skypilot_sessions(Path(sky_user["HOME"]))
    assert sessions

    gate.write_text(str(3 * RESPONSES))
    cloud_cli.wait("cloud", lambda s: working(s) >= late_names, UP_S)
    outcome = cloud_cli.wait_outcome("cloud", UP_S)
    assert outcome["state"] == "done", outcome
    clock.say("the run is done")
    until(lambda: all(m["ended_at"] for m in spots()), 120, "nothing is left in the cloud")
    cloud_cli("down", "cloud", "--yes")
    assert living(lab) == []
    until(lambda: not members_of(sessions), 120, "SkyPilot's API server has ended with its executors")
    clock.say("nothing is left")
    check_boots(cloud_cli.json("status", "cloud"), spot_machines - set(victims) | late_names)
    check_bill(cloud_cli.json("cost", "cloud"), spots(), BILL_SLACK_S * slowness)


def check_boots(status: dict[str, Any], machines: set[str]) -> None:
    """Each machine says how long it took from the wish for it to its first token, phase by phase."""
    booted = {m["id"]: m["boot_s"] for m in status["machines"] if m["id"] in machines}
    for name, phases in booted.items():
        assert tuple(phases) == PHASES, (name, phases)
        assert phases["boot"] > 0, "SkyPilot's own setup takes a while"
        assert phases["install"] > 0
        assert all(took >= 0 for took in phases.values()), (name, phases)
    print("\n".join(boot_times(read_status(status))))


def check_bill(cost: dict[str, Any], spots: list[dict[str, Any]], slack_s: float) -> None:
    """Ledger = instance-seconds x the price of its zone, machine by machine, and never less."""
    billed = {m["id"]: m for m in cost["machines"] if m["pool"] == "spot" and m["billed_s"] > 0}
    assert set(billed) == {m["tags"]["rlboost-machine"] for m in spots}
    for there in spots:
        ours = billed[there["tags"]["rlboost-machine"]]
        prices = {w.spot_price for w in WARES if w.region == there["region"] and w.accelerator == "A10G"}
        assert ours["price_usd_per_hour"] in prices
        seconds = there["ended_at"] - there["launched_at"]
        assert seconds - LATE_S - 3 <= ours["billed_s"] <= seconds + slack_s, (ours, there)
        assert ours["cost_usd"] == pytest.approx(
            ours["billed_s"] * ours["price_usd_per_hour"] / 3600, abs=2e-6
        )
    total = sum(m["cost_usd"] for m in cost["machines"]) + sum(cost["other_usd"].values())
    assert cost["total_usd"] == pytest.approx(total, abs=1e-6)
    print(json.dumps({"spot_machines": len(spots), "total_usd": cost["total_usd"], "cpus": os.cpu_count()}))
