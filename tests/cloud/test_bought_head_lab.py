"""A head that is bought from EC2 and ends itself: the laptop is off, and nothing is left in the cloud."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from cloudlab.client import Lab
from cloudlab.machine import GATEWAY

from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200, func_only=True)]
UP_S = 600.0
BILL_SLACK_S = 15.0
PRICE = 1.006
"""Of a g5.xlarge on demand, in the shipped table."""
BUCKET = "runs-of-the-lab"
RELAY = """
import asyncio, sys

async def carry(source, target):
    while part := await source.read(65536):
        target.write(part)
        await target.drain()
    target.close()

async def accept(reader, writer):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(accept, sys.argv[1], 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""

HEAD: dict[str, Any] = {
    "infra": "aws/us-east-1",
    "accelerators": "A10G:1",
    "private_address": True,
    "price_usd_per_hour": 0.0,
}


@pytest.fixture
def api(lab: Lab) -> Iterator[str]:
    """The cloud's API as machines of the lab reach it."""
    _, _, port = lab.url.rpartition(":")
    with relay(GATEWAY, int(port)) as own_port:
        yield f"http://{GATEWAY}:{own_port}"


@pytest.fixture
def laptop(lab: Lab, cloud_cli: Cli) -> Cli:
    """The command line of a user with keys in the environment, and a bucket."""
    keys = {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab-secret", "AWS_REGION": "us-east-1"}
    cloud_cli.environment |= keys
    cloud_cli.environment.pop("SSH_AUTH_SOCK", None)
    lab.ask("refuse", regions=[])
    s3: Any = boto3.client("s3", region_name="us-east-1", endpoint_url=lab.url)
    s3.create_bucket(Bucket=BUCKET)
    return cloud_cli


@contextlib.contextmanager
def relay(host: str, port: int) -> Iterator[int]:
    """Yield a port of `host` at which `port` of loopback is reached."""
    with subprocess.Popen(
        [sys.executable, "-c", RELAY, host, str(port)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def until(condition: Any, seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
    return found


def said_there(lab: Lab, before: int) -> str:
    """What the machines of this test say about themselves, for a failure's message."""
    logs = "/run/user-data.log /opt/rlboost-head/watch.log /home/rlboost/.rlboost/heads/*/runs/*/logs/*.log"
    script = f"tail -n 30 {logs}"
    return "\n".join(
        lab.ask("shell", id=each["id"], script=script)
        for each in lab.machines()[before:]
        if each["ended_at"] is None
    )


def all_gone(lab: Lab) -> bool:
    return all(each["ended_at"] is not None for each in lab.machines())


def seconds_of(machine: dict[str, Any]) -> float:
    return float(machine["ended_at"] - machine["launched_at"])


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
    s3: Any = boto3.client("s3", region_name="us-east-1", endpoint_url=lab.url)
    names = {each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET)["Contents"]}
    assert {"runs/far/model/model.safetensors", "runs/far/report/outcome.json"} <= names
    laptop("down", "far", "--yes")
    assert laptop.json("cost", "far")["total_usd"] == cost["total_usd"]
    assert "no machine is left over" in laptop("gc", "--dry-run", timeout_s=UP_S).stderr


def test_two_commands_rent_one_head_and_a_head_whose_runtime_was_killed_ends_itself(
    lab: Lab, laptop: Cli
) -> None:
    before = len(lab.machines())
    job = laptop.job("idle", trainer=HEAD, after={"idle_minutes": 0.3})
    ups = [laptop.start("up", job) for _ in range(2)]
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
