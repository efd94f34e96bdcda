"""Spot machines through the real SkyPilot, from offers to a reclaim, on the lab's cloud."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cloudlab.client import Lab
from cloudlab.machine import GATEWAY
from machine_secrets import check_credentials

from rlboost_providers.base.provider import LaunchRequest, MachineStatus, MachineView
from rlboost_providers.base.tags import machine_name
from rlboost_providers.skypilot import provider as module
from rlboost_providers.skypilot.errors import fetch_logs
from rlboost_providers.skypilot.provider import SkyPilotProvider
from rlboost_runtime.agent.bootstrap import Bootstrap
from rlboost_runtime.engines.base import EngineSettings
from rlboost_runtime.errors import NoCapacity, NotYet
from rlboost_runtime.job import CloudOffer
from rlboost_runtime.protocol.messages import Sampling
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.security import create_secrets

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1500, func_only=True),
]  # the image may have to be made first
RUN = "lab"
BOOT_S = 600.0
SECRET = "the-run-token-of-the-lab"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / RUN
    folder.mkdir()
    create_secrets(RunFolder(folder))
    return folder


@pytest.fixture(scope="module")
def provider(sky_user: dict[str, str], run: Path) -> Iterator[SkyPilotProvider]:
    made = SkyPilotProvider(run, [CloudOffer(infra="aws", accelerators="A10G:1")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LAUNCH_ANSWER_S", BOOT_S)  # a refusal is to be heard on a busy machine too
        yield made
    made.close()


def wait_for(
    provider: SkyPilotProvider, machine: str, ready: Callable[[MachineView], bool], timeout_s: float
) -> MachineView:
    deadline = time.monotonic() + timeout_s
    view = None
    while time.monotonic() < deadline:
        for view in provider.watch(RUN) or []:
            if view.machine == machine and ready(view):
                return view
        time.sleep(0.5)
    raise AssertionError(f"{machine} is {view} after {timeout_s} s")


def request(provider: SkyPilotProvider, run: Path, machine: str, region: str) -> LaunchRequest:
    offer = next(offer for offer in provider.offers() if region in offer.zone)
    bootstrap = Bootstrap(
        run=RUN,
        machine=machine,
        pool="spot",
        instances=(f"{machine}/0",),
        coordinator_url=f"https://{GATEWAY}:9",  # nobody is there: the agent goes on dialling
        token=SECRET,
        certificate=RunFolder(run).certificate.read_text(),
        engine=EngineSettings("transformers", Sampling(), 64, 1, "float32", 0),
    )
    return LaunchRequest(RUN, machine, offer, msgspec.to_builtins(bootstrap))


def wait_for_skypilot(provider: SkyPilotProvider) -> None:
    deadline = time.monotonic() + BOOT_S
    while time.monotonic() < deadline:
        try:
            provider.offers()
        except NotYet:
            continue
        return
    raise AssertionError("SkyPilot does not start")


def wait_for_installation(lab: Lab, id: str) -> str:
    deadline = time.monotonic() + BOOT_S
    script = (
        "cat /home/ubuntu/.rlboost/install.json 2> /dev/null && pgrep -f rlboost_runtime.agent > /dev/null"
    )
    while time.monotonic() < deadline:
        if (found := lab.ask("shell", id=id, script=script)).startswith("{"):
            return found
        time.sleep(1)
    log = lab.ask(
        "shell", id=id, script="tail -n 40 /home/ubuntu/.rlboost/install.log /home/ubuntu/.rlboost/machine/*"
    )
    raise AssertionError(f"no installation after {BOOT_S:g} s:\n{log}")


def of_run(lab: Lab) -> list[dict[str, Any]]:
    return [m for m in lab.machines() if m["tags"].get("rlboost-run") == RUN]


def only(lab: Lab, machine: str) -> dict[str, Any]:
    (found,) = [m for m in of_run(lab) if m["tags"]["rlboost-machine"] == machine]
    return found


def test_a_machine_comes_up_is_taken_and_another_region_stands_in(lab, provider, run) -> None:
    wait_for_skypilot(provider)
    prices = [offer.price_micro_usd_per_hour for offer in provider.offers()]
    assert prices == sorted(prices)
    assert prices[0] == 350_000

    lab.ask("refuse", regions=["us-west-2"])
    with pytest.raises(NoCapacity, match="InsufficientInstanceCapacity"):
        provider.launch(request(provider, run, "spot-0", "us-west-2"))
    assert of_run(lab) == []
    assert {v.machine: v.state for v in provider.describe(RUN)} == {"spot-0": MachineStatus.GONE}

    lab.ask("bare_images", count=1)
    began = time.time()
    launched = provider.launch(request(provider, run, "spot-1", "us-east-1"))
    assert launched.state is MachineStatus.STARTING
    wait_for(provider, "spot-1", lambda v: v.state is MachineStatus.RUNNING, BOOT_S)
    record = only(lab, "spot-1")
    assert record["is_spot"]
    assert record["tags"]["rlboost-run"] == RUN
    print(f"cluster up after {time.time() - began:.1f} s")
    install = wait_for_installation(lab, record["id"])
    print(f"installed after {time.time() - began:.1f} s: {install}")
    assert set(json.loads(install)) == {"uv", "python", "requirements", "wheel"}

    check_credentials(lab, record["id"], SECRET)
    lab.ask("shell", id=record["id"], script="pkill -KILL -x raylet")
    time.sleep(10)  # Ray ends what belongs to its jobs
    assert lab.ask("shell", id=record["id"], script="pgrep -f '[r]lboost_runtime.agent'"), (
        "the agent lives on"
    )

    assert provider.launch(request(provider, run, "spot-1", "us-east-1")).machine == "spot-1"
    assert len([m for m in of_run(lab) if m["ended_at"] is None]) == 1
    assert fetch_logs(machine_name(RUN, "spot-1", record["tags"]["rlboost-owner"], longest=40), run)
    assert "install: wheel done" in (run / "machine.log").read_text()

    lab.ask("reclaim", id=record["id"], how="silent")
    gone = wait_for(provider, "spot-1", lambda v: v.state is MachineStatus.GONE, 120)
    assert gone.ended_at is not None
    assert gone.ended_at == pytest.approx(only(lab, "spot-1")["ended_at"], abs=15)
    provider.terminate(RUN, "spot-1")
    assert all(m["ended_at"] for m in of_run(lab))
