"""A trainer over two bought machines: the head buys the second, loses it, buys another and goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from bought_heads import PRICE, all_gone, said_there, seconds_of, until
from cloudlab.client import Lab

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500, func_only=True)]
UP_S = 900.0
BILL_SLACK_S = 15.0
STEPS = 12
ENDED = ("done", "failed", "stopped")
HEAD: dict[str, Any] = {
    "infra": "aws/us-east-1",
    "accelerators": "A10G:1",
    "allow_cpu": True,
    "private_address": True,
    "price_usd_per_hour": 0.0,
    "nodes": 2,
    "checkpoint_every_steps": 1,
}
RUN = "/home/rlboost/.rlboost/heads/*/runs/pair"
LIST = """
import json, pathlib
here = pathlib.Path()
paths = [*here.glob("former_versions/*.json"), *here.glob("weights/v*/manifest.json")]
names = [path.stem if path.stem != "manifest" else path.parent.name for path in paths]
print(json.dumps({name: path.read_text() for name, path in zip(names, paths)}))
"""
VERSIONS = f"cd {RUN} && python3 - <<'END'\n{LIST}\nEND"
"""Manifests of all versions that the head has published, by version: sizes and digests of their files."""
LOGS = "tail -n 40 /opt/rlboost/*.log /run/user-data.log; tail -n 60 " + f"{RUN}/logs/*.log"


def logs_of(lab: Lab, before: int) -> str:
    alive = [each for each in lab.machines()[before:] if each["ended_at"] is None]
    return "\n".join(f"--- {each['id']}\n{lab.ask('shell', id=each['id'], script=LOGS)}" for each in alive)


def roll_out(laptop: Cli, seen: set[str]) -> bool:
    """Add the engines that roll out now to `seen`; return True once both nodes' have."""
    instances = laptop.json("status", "pair")["instances"]
    seen |= {each["id"] for each in instances if each["tokens_per_s"] > 0}
    return seen >= {"reserved-0/0", "reserved-1/0"}


def test_two_bought_nodes_train_and_roll_out_and_a_lost_one_is_replaced(
    lab: Lab, api: str, laptop: Cli
) -> None:
    before = len(lab.machines())
    job = laptop.job(
        "pair",
        trainer=HEAD,
        algorithm={"steps": STEPS},
        rollout={"spot": {"min_instances": 0, "max_instances": 0}},
        env={"AWS_ENDPOINT_URL": api, "AWS_REGION": "us-east-1"},
        secrets=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
        after={"idle_minutes": 30},
    )
    began = time.monotonic()
    laptop("launch", job, "--yes", "--detach", timeout_s=UP_S)
    try:
        until(lambda: laptop.json("status", "pair")["step"] >= 2, UP_S, "no second step")
        print(f"two steps {time.monotonic() - began:.0f} s after the launch")
        head, node = lab.machines()[before:]
        assert (head["is_spot"], node["is_spot"], node["role"]) == (False, False, None)
        seen: set[str] = set()
        until(lambda: roll_out(laptop, seen), 120, f"a node rolls out nothing: {seen}")
        ranks = lab.ask("shell", id=node["id"], script="pgrep -fc 'trainer.node'")
        assert int(ranks) >= 2, "its launcher and its rank"

        lab.ask("reclaim", id=node["id"], how="silent")
        lost, published = time.monotonic(), json.loads(lab.ask("shell", id=head["id"], script=VERSIONS))
        trained = laptop.json("status", "pair")["step"]
        until(lambda: laptop.json("status", "pair")["step"] >= trained + 2, UP_S, "it does not go on")
        print(f"two more steps {time.monotonic() - lost:.0f} s after a node had vanished silently")
        since = json.loads(lab.ask("shell", id=head["id"], script=VERSIONS))
        again = {name: since[name] for name in published if name in since}
        assert again == {name: published[name] for name in again}, "versions are the same, byte for byte"
        until(lambda: laptop.json("status", "pair")["state"] in ENDED, UP_S, "it does not end")
        assert laptop.json("status", "pair")["state"] == "done"
    except (AssertionError, KeyError, ValueError):
        print(said_there(lab, before), logs_of(lab, before))
        raise
    laptop("down", "pair", "--yes", timeout_s=UP_S)
    until(lambda: all_gone(lab), 60, f"something is left: {lab.machines()}")
    head, node, second = lab.machines()[before:]

    cost = laptop.json("cost", "pair")
    billed = {machine["id"]: machine for machine in cost["machines"]}
    assert set(billed) == {"reserved-0", "reserved-1", "reserved-1-2"}
    assert {machine["pool"] for machine in billed.values()} == {"reserved"}
    for name, there in (("reserved-0", head), ("reserved-1", node), ("reserved-1-2", second)):
        assert billed[name]["billed_s"] == pytest.approx(seconds_of(there), abs=BILL_SLACK_S), name
        assert billed[name]["cost_usd"] == pytest.approx(PRICE * billed[name]["billed_s"] / 3600, abs=1e-5)
    assert [step["step"] for step in cost["steps"]] == list(range(STEPS))
    assert "no orphaned machines" in laptop("gc", "--dry-run", timeout_s=UP_S).stderr
