"""A head that is bought from EC2 and ends itself: the laptop is off, and nothing is left in the cloud."""

from __future__ import annotations

from typing import Any

import pytest
from bought_heads import BUCKET, PRICE, all_gone, names_at_bucket, said_there, seconds_of, until
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


def test_with_the_laptop_dead_the_run_ends_and_so_do_its_fleet_and_its_head(
    lab: Lab, api: str, laptop: Cli
) -> None:
    before = len(lab.machines())
    spot = {"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct"}
    job = laptop.job(
        "far",
        trainer=HEAD,
        algorithm={"steps": 3},
        rollout={"spot": {"min_instances": 1, "max_instances": 1, "any_of": [spot]}},
        output=f"s3://{BUCKET}/runs",
        env={"AWS_ENDPOINT_URL": api, "AWS_REGION": "us-east-1"},
        secrets=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
    )
    watching = laptop.start("launch", job, "--yes")
    try:
        until(
            lambda: laptop.run_folder("far").status.exists() or watching.poll() is not None, UP_S, "no status"
        )
        assert watching.poll() is None, "".join(watching.communicate())
        until(lambda: len(lab.machines()) == before + 2, 120, "its head launches no machine")
        intents = laptop.run_folder("far").path / "cloud/bought.json"
        until(intents.exists, 30, "the attached laptop hears of no launch")
    finally:
        watching.kill()  # the laptop is off
        watching.communicate()
    assert laptop.run_folder("far").outcome.exists() is False
    until(lambda: all_gone(lab), UP_S, f"something is left: {lab.machines()}\n{said_there(lab, before)}")
    head, worker = lab.machines()[before:]
    assert (head["is_spot"], worker["is_spot"]) == (False, True)
    assert worker["role"] is None

    assert laptop.json("status", "far")["state"] == "done"  # the laptop is on again, and reads the bucket
    cost = laptop.json("cost", "far")
    billed = {machine["pool"]: machine for machine in cost["machines"]}
    assert billed["reserved"]["billed_s"] == pytest.approx(seconds_of(head), abs=BILL_SLACK_S)
    assert billed["reserved"]["cost_usd"] == pytest.approx(
        PRICE * billed["reserved"]["billed_s"] / 3600, abs=1e-5
    )
    assert billed["spot"]["billed_s"] == pytest.approx(seconds_of(worker), abs=BILL_SLACK_S)
    assert cost["tokens_trained"] > 0
    assert {"runs/far/model/model.safetensors", "runs/far/report/outcome.json"} <= names_at_bucket(lab)
    laptop("down", "far", "--yes")
    assert laptop.json("cost", "far")["total_usd"] == cost["total_usd"]
    assert "no orphaned machines" in laptop("gc", "--dry-run", timeout_s=UP_S).stderr


def test_two_commands_rent_one_head_and_a_head_whose_runtime_was_killed_ends_itself(
    lab: Lab, laptop: Cli
) -> None:
    before = len(lab.machines())
    job = laptop.job("idle", trainer=HEAD, after={"idle_minutes": 0.3})
    ups = [laptop.start("up", job, "--yes") for _ in range(2)]
    for up in ups:
        out, err = up.communicate(timeout=UP_S)
        assert up.returncode == 0, (out, err, said_there(lab, before))
    (head,) = lab.machines()[before:]
    lab.ask("shell", id=head["id"], script="pkill -KILL -f rlboost_runtime")
    until(lambda: all_gone(lab), 120, f"it does not end itself: {said_there(lab, before)}")
    (head,) = lab.machines()[before:]
    assert laptop.json("status", "idle")["state"] == "failed"
    laptop("down", "idle", "--yes")
    machines = laptop.json("cost", "idle")["machines"]  # its spot machines were processes there
    billed = next(machine for machine in machines if machine["pool"] == "reserved")
    assert billed["billed_s"] == pytest.approx(seconds_of(head), abs=BILL_SLACK_S)
    assert billed["cost_usd"] == pytest.approx(PRICE * billed["billed_s"] / 3600, abs=1e-5)
