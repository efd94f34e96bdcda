"""A head that is bought through the real SkyPilot ends itself: the laptop is off, or our own part is dead."""

from __future__ import annotations

from pathlib import Path

import pytest
from bought_heads import BUCKET, PRICE, all_gone, cause_of_end, names_at_bucket, said_there, seconds_of, until
from cloudlab import catalogue
from cloudlab.client import Lab
from metadata_service import start_metadata_service

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500, func_only=True)]
UP_S = 900.0
BILL_SLACK_S = 20.0
AUTODOWN = """
sudo -u ubuntu env HOME=/home/ubuntu $(cat /home/ubuntu/.sky/python_path) -c '
from sky.skylet import autostop_lib
found = autostop_lib.get_autostop_config()
print("autodown", found.autostop_idle_minutes, found.down, autostop_lib.get_last_active_time() > 0)'
ls /home/ubuntu/.aws/credentials /home/rlboost/.aws 2> /dev/null
cat /opt/rlboost-head/watch.log
"""

LATER = """
pkill -f '[r]lboost-head/watch.sh'
pkill -f '[r]lboost-head/watch.py'
pkill -f -- '[-]-port=46590'
sudo -u ubuntu env HOME=/home/ubuntu AWS_ENDPOINT_URL={api} bash -c '
setsid --fork $(cat ~/.sky/python_path) -m sky.skylet.skylet >> ~/.sky/skylet.log 2>&1 < /dev/null
sleep 10
$(cat ~/.sky/python_path) -c "
import time
from sky.skylet import autostop_lib, configs
configs.set_config(autostop_lib._AUTOSTOP_LAST_ACTIVE_TIME, str(time.time() - 60 * {minutes}))"'
pgrep -f '[r]lboost-head/watch.py'
"""
"""Our part is dead, and twenty minutes have passed. `skylet` is told where the lab's EC2 is."""
SAID = "tail -n 60 /home/ubuntu/.sky/skylet.log; ps aux | grep -v grep | grep -E 'skylet|sshd|watch'"


def job_of(laptop: Cli, api: str) -> Path:
    """Return a job whose head is bought through SkyPilot."""
    spot = {"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct"}
    return laptop.job(
        "skyfar",
        trainer={
            "infra": "aws/us-east-1",
            "via": "skypilot",
            "accelerators": "A10G:1",
            "allow_cpu": True,
            "role": catalogue.ROLE,
            "private_address": True,
            "price_usd_per_hour": 0.0,
        },
        algorithm={"steps": 3},
        rollout={"spot": {"min_instances": 1, "max_instances": 1, "any_of": [spot]}},
        output=f"s3://{BUCKET}/runs",
        env={"AWS_ENDPOINT_URL": api, "AWS_REGION": "us-east-1"},
    )


def test_where_our_part_of_a_head_is_dead_autodown_of_skypilot_ends_it(
    lab: Lab, api: str, sky_user: dict[str, str], laptop: Cli
) -> None:
    laptop.environment |= {**sky_user, "RLBOOST_HOME": str(laptop.home)}
    before = len(lab.machines())
    laptop("up", job_of(laptop, api), "--yes", timeout_s=UP_S)
    (head,) = lab.machines()[before:]
    start_metadata_service(lab, head["id"])  # all that it may do, it may by its role
    assert lab.ask("shell", id=head["id"], script=LATER.format(api=api, minutes=21)).strip() == ""
    try:
        until(lambda: all_gone(lab), 200, "it is still there")
    except AssertionError as exc:
        raise AssertionError(lab.ask("shell", id=head["id"], script=SAID)) from exc
    laptop("down", "skyfar", "--yes", timeout_s=UP_S)
    (head,) = lab.machines()[before:]
    (billed,) = laptop.json("cost", "skyfar")["machines"]
    assert billed["billed_s"] >= seconds_of(head) - BILL_SLACK_S
    assert "no orphaned machines" in laptop("gc", "--dry-run", timeout_s=UP_S).stderr


def test_with_the_laptop_dead_a_head_of_skypilot_ends_its_run_its_fleet_and_itself(
    lab: Lab, api: str, sky_user: dict[str, str], laptop: Cli
) -> None:
    laptop.environment |= {**sky_user, "RLBOOST_HOME": str(laptop.home)}
    before = len(lab.machines())
    job = job_of(laptop, api)
    watching = laptop.start("launch", job, "--yes")
    try:
        until(
            lambda: any(each["booted_at"] for each in lab.machines()[before:]) or watching.poll() is not None,
            UP_S,
            "no machine",
        )
        assert watching.poll() is None, "".join(watching.communicate())
        start_metadata_service(lab, lab.machines()[before]["id"])  # all that it may do, it may by its role
        until(
            lambda: laptop.run_folder("skyfar").status.exists() or watching.poll() is not None,
            UP_S,
            "no status",
        )
        assert watching.poll() is None, "".join(watching.communicate())
        until(lambda: len(lab.machines()) == before + 2, 180, "its head launches no machine")
        head = lab.machines()[before]
        told = lab.ask("shell", id=head["id"], script=AUTODOWN)
        assert told.strip() == "autodown 20 True True", "nothing is uploaded, and the second line is drawn"
        until(
            (laptop.run_folder("skyfar").path / "cloud/bought.json").exists,
            60,
            "the laptop hears of no launch",
        )
    finally:
        watching.kill()  # the laptop is off
        watching.communicate()
    until(lambda: all_gone(lab), UP_S, f"something is left: {lab.machines()}\n{said_there(lab, before)}")
    head, worker = lab.machines()[before:]
    assert (head["is_spot"], head["role"], worker["is_spot"]) == (False, catalogue.ROLE, True)
    assert cause_of_end(lab, head) == "Client.UserInitiatedShutdown", "ended, not merely switched off"

    assert laptop.json("status", "skyfar")["state"] == "done"  # the laptop is on again, and reads the bucket
    cost = laptop.json("cost", "skyfar")
    billed = {machine["pool"]: machine for machine in cost["machines"]}
    assert billed["reserved"]["billed_s"] == pytest.approx(seconds_of(head), abs=BILL_SLACK_S)
    assert billed["reserved"]["price_usd_per_hour"] == PRICE
    assert billed["spot"]["billed_s"] == pytest.approx(seconds_of(worker), abs=BILL_SLACK_S)
    assert {"runs/skyfar/model/model.safetensors", "runs/skyfar/report/outcome.json"} <= names_at_bucket(lab)
    laptop("down", "skyfar", "--yes", timeout_s=UP_S)
    assert laptop.json("cost", "skyfar")["total_usd"] == cost["total_usd"]
    assert "no orphaned machines" in laptop("gc", "--dry-run", timeout_s=UP_S).stderr
