"""A head that is bought, with the laptop on: a launch to its end, a run that is ended, one that goes on."""

from __future__ import annotations

from typing import Any

import pytest
from bought_heads import PRICE, cause_of_end, said_there, seconds_of, until
from cloudlab.client import Lab

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200, func_only=True)]
UP_S = 600.0
BILL_SLACK_S = 15.0
HEAD: dict[str, Any] = {
    "infra": "aws/us-east-1",
    "accelerators": "A10G:1",
    "allow_cpu": True,
    "private_address": True,
    "price_usd_per_hour": 0.0,
}
DOWN_THERE = """
home=$(ls -d /home/rlboost/.rlboost/heads/*)
setsid --fork runuser -u rlboost -- env HOME=/home/rlboost RLBOOST_HOME=$home \\
  /home/rlboost/.rlboost/venv/bin/rlboost down again --yes > /run/down.log 2>&1 < /dev/null
"""


def bill_of_head(laptop: Cli, run: str) -> dict[str, Any]:
    """Return what the books say of the run's head."""
    machines = laptop.json("cost", run)["machines"]
    return next(machine for machine in machines if machine["pool"] == "reserved")


def check_bill(laptop: Cli, run: str, head: dict[str, Any]) -> None:
    bill = bill_of_head(laptop, run)
    assert bill["billed_s"] == pytest.approx(seconds_of(head), abs=BILL_SLACK_S)
    assert bill["cost_usd"] == pytest.approx(PRICE * bill["billed_s"] / 3600, abs=1e-5)


def test_a_launch_that_is_watched_to_its_end_brings_the_model_home_and_gives_the_head_back(
    lab: Lab, laptop: Cli
) -> None:
    before = len(lab.machines())
    job = laptop.job("watched", trainer=HEAD, algorithm={"steps": 2}, after={"idle_minutes": 30})
    laptop("launch", job, "--yes", timeout_s=UP_S)
    (head,) = lab.machines()[before:]
    assert head["ended_at"] is not None, "it is given back before the command ends, not in half an hour"
    assert cause_of_end(lab, head) == "Client.UserInitiatedShutdown"
    assert laptop.json("status", "watched")["state"] == "done"
    assert (laptop.run_folder("watched").checkpoints / "model" / "model.safetensors").exists()
    check_bill(laptop, "watched", head)


def test_down_ends_a_run_that_is_training_with_its_head_and_keeps_what_it_has(lab: Lab, laptop: Cli) -> None:
    before = len(lab.machines())
    job = laptop.job("cut", trainer=HEAD, algorithm={"steps": 400}, after={"idle_minutes": 30})
    laptop("launch", job, "--yes", "--detach", timeout_s=UP_S)
    until(lambda: laptop.json("status", "cut")["step"] >= 2, UP_S, said_there(lab, before))
    laptop("down", "cut", "--yes", timeout_s=UP_S)
    (head,) = lab.machines()[before:]
    assert head["ended_at"] is not None
    assert laptop.json("status", "cut")["state"] == "stopped"
    assert list(laptop.run_folder("cut").checkpoints.glob("*")), "its newest checkpoint came home"
    check_bill(laptop, "cut", head)
    assert "no orphaned machines" in laptop("gc", "--dry-run", timeout_s=UP_S).stderr


def test_a_run_goes_on_on_its_head_after_a_crash_and_after_it_was_ended_there(lab: Lab, laptop: Cli) -> None:
    before = len(lab.machines())
    job = laptop.job(
        "again",
        trainer=HEAD,
        algorithm={"steps": 10},
        rollout={"spot": {"max_instances": 1}},
        after={"idle_minutes": 30},
    )
    laptop("launch", job, "--yes", "--detach", timeout_s=UP_S)
    until(lambda: laptop.json("status", "again")["step"] >= 2, UP_S, said_there(lab, before))
    (head,) = lab.machines()[before:]
    lab.ask("shell", id=head["id"], script="pkill -KILL -f rlboost_runtime")
    laptop("launch", "again", "--yes", "--detach", timeout_s=UP_S)
    until(lambda: laptop.json("status", "again")["step"] >= 4, UP_S, said_there(lab, before))
    lab.ask("shell", id=head["id"], script=DOWN_THERE)
    until(lambda: laptop.json("status", "again")["state"] == "stopped", UP_S, said_there(lab, before))
    laptop("launch", "again", "--resume", "--yes", timeout_s=UP_S)
    assert laptop.json("status", "again")["state"] == "done"
    assert [step["step"] for step in laptop.json("cost", "again")["steps"]] == list(range(10))
    (head,) = lab.machines()[before:]
    assert head["ended_at"] is not None
    check_bill(laptop, "again", head)
