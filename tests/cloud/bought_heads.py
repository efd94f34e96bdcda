"""A head that is bought in the lab's cloud: how tests reach the cloud from it, and what they see of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import boto3
from cloudlab.client import Lab

PRICE = 1.006
"""Of a g5.xlarge on demand, in the shipped table and in the lab's catalogue."""
BUCKET = "runs-of-the-lab"
KEYS = {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab-secret", "AWS_REGION": "us-east-1"}
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


def names_at_bucket(lab: Lab) -> set[str]:
    """Return what the bucket has."""
    s3: Any = boto3.client("s3", region_name="us-east-1", endpoint_url=lab.url)
    return {each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])}


def cause_of_end(lab: Lab, machine: dict[str, Any]) -> str:
    """Return what EC2 says why a machine ended."""
    ec2: Any = boto3.client("ec2", region_name=machine["region"], endpoint_url=lab.url)
    (instance,) = ec2.describe_instances(InstanceIds=[machine["id"]])["Reservations"][0]["Instances"]
    assert instance["State"]["Name"] == "terminated", instance["State"]
    return str(instance["StateReason"]["Code"])
