"""The CLI's client against the coordinator's own port, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.runs import client
from rlboost_cli.runs.run_status import run_status
from rlboost_providers.base.startup import installation
from rlboost_runtime.coordinator.links.server import Handlers, bind, make_app, make_server
from rlboost_runtime.deploy.shipment import archive
from rlboost_runtime.errors import NotFound, ProtocolError, ProviderError, RuntimeFault
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.security import create_secrets, read_token
from rlboost_runtime.seams import Transport

pytestmark = pytest.mark.integration


class Calls:
    """What the port was asked for."""

    def __init__(self) -> None:
        self.preempted: list[tuple[str, float | None]] = []
        self.stopped: list[tuple[str, str, str]] = []
        self.shipped = Path()

    async def connect(self, transport: Transport) -> None:
        raise ConnectionError("nobody connects in these tests")

    def status(self) -> dict[str, Any]:
        return {"run": "demo", "state": "rollout", "step": 3, "long": "x" * 200_000}

    async def runtime(self, machine: str) -> bytes:
        return archive(self.shipped)

    async def wheels(self, machine: str, name: str) -> dict[str, Any] | None:
        raise RuntimeFault(f"machines of this run install no {name}", "ask for another")

    async def preempt(self, instance: str, notice_s: float | None) -> None:
        if instance == "cloudless":
            raise ProviderError("the cloud is away", "try again")
        if instance != "spot-1":
            raise NotFound(f"no instance {instance}", "rlboost status demo")
        self.preempted.append((instance, notice_s))

    def stop(self, state: str, problem: str, remedy: str, exit_code: int | None) -> None:
        self.stopped.append((state, problem, remedy))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "demo")
    folder.path.mkdir()
    write_json(folder.job_json, {})
    create_secrets(folder)
    return folder


@pytest.fixture
def calls(run: RunFolder) -> Iterator[Calls]:
    calls = Calls()
    handlers = Handlers(
        agent=calls.connect,
        trainer=calls.connect,
        requests=calls.connect,
        status=calls.status,
        preempt=calls.preempt,
        stop=calls.stop,
        runtime=calls.runtime,
        wheels=calls.wheels,
        is_live=lambda machine: True,
    )
    listener = bind(run)
    server = make_server(make_app(handlers, read_token(run)), run)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield calls
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


def test_status_comes_from_the_living_coordinator(run: RunFolder, calls: Calls) -> None:
    status = client.get_status(run, 10.0)
    assert (status["step"], len(status["long"])) == (3, 200_000)
    found = run_status(run, 10.0)
    assert (found.is_live, found.has_ended, found.problem, found.age_s) == (True, False, None, 0.0)


def test_metrics_for_prometheus_need_the_token(run: RunFolder, calls: Calls) -> None:
    url = read_json(run.endpoint)["url"] + "/metrics"
    context = ssl.create_default_context(cafile=str(run.certificate))
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(url, context=context, timeout=10)
    refused.value.close()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {read_token(run)}"})
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'rlboost_steps_total{run="demo"} 3\n' in answer.read().decode()


def test_preempt_reaches_the_instance_or_says_why_not(run: RunFolder, calls: Calls) -> None:
    client.preempt(run, "spot-1", None)
    client.preempt(run, "spot-1", 2.5)
    assert calls.preempted == [("spot-1", None), ("spot-1", 2.5)]
    with pytest.raises(NotFound) as error:
        client.preempt(run, "spot-9", None)
    assert (error.value.problem, error.value.remedy) == ("no instance spot-9", "rlboost status demo")
    with pytest.raises(ProviderError, match="the cloud is away"):
        client.preempt(run, "cloudless", None)


def test_stop_says_who_ended_the_run(run: RunFolder, calls: Calls) -> None:
    client.stop(run, 10.0)
    ((state, problem, remedy),) = calls.stopped
    assert (state, problem) == ("stopped", "ended by `rlboost down`")
    assert "--resume" in remedy


def test_a_wrong_token_is_refused(run: RunFolder, calls: Calls) -> None:
    run.token.write_text("guessed")
    with pytest.raises(ProtocolError, match="401"):
        client.get_status(run, 10.0)


def test_another_runs_certificate_is_not_trusted(run: RunFolder, calls: Calls, tmp_path: Path) -> None:
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    create_secrets(other)
    write_json(other.endpoint, {"url": run.endpoint.read_text().split('"')[3]})
    with pytest.raises(client.NotAnswering, match="certificate"):
        client.get_status(other, 10.0)


def test_nobody_listening_is_told_at_once_with_what_to_type(run: RunFolder) -> None:
    with pytest.raises(client.NotAnswering, match="is not listening yet"):
        client.get_status(run)
    with contextlib.closing(bind(run)):
        pass
    with pytest.raises(client.NotAnswering) as error:
        client.get_status(run)
    assert "rlboost launch demo" in error.value.remedy


def test_a_peer_that_says_nothing_is_given_up_at_the_deadline(run: RunFolder) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        write_json(run.endpoint, {"url": f"https://127.0.0.1:{listener.getsockname()[1]}"})
        began = time.monotonic()
        with pytest.raises(client.NotAnswering):
            client.get_status(run, 0.3)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("who", ["ours", "no_token", "another_head"])
def test_a_machine_that_can_only_dial_out_fetches_the_runtime_from_its_head_and_no_other(
    run: RunFolder, calls: Calls, tmp_path: Path, who: str
) -> None:
    calls.shipped = tmp_path / "shipped"
    calls.shipped.mkdir()
    (calls.shipped / "rlboost-0-py3-none-any.whl").write_bytes(b"\x00wheel" * 100_000)
    (calls.shipped / "install.sh").write_text('cp runtime/*.whl "$RLBOOST_ROOT/installed"')
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    create_secrets(other)
    machine = tmp_path / "machine"
    machine.mkdir()
    told = {
        "coordinator_url": read_json(run.endpoint)["url"],
        "token": read_token(other if who == "no_token" else run),
        "certificate": (other if who == "another_head" else run).certificate.read_text(),
    }
    (machine / "bootstrap.json").write_text(json.dumps(told))
    script = installation().replace("(1, 2, 4, 8, 16, 32, 64, None)", "(0, None)")  # it may take minutes
    (machine / "install.sh").write_text(script)
    environment = {name: os.environ[name] for name in ("PATH",)}  # as cloud-init has it: no HOME
    done = subprocess.run(
        ["bash", "install.sh"], cwd=machine, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode == 0) == (who == "ours"), done.stdout + done.stderr
    assert told["token"] not in done.stdout + done.stderr
    installed = machine / "installed"
    if who == "ours":
        assert installed.read_bytes() == (calls.shipped / "rlboost-0-py3-none-any.whl").read_bytes()
    else:
        assert not installed.exists()
        assert "the head does not give the runtime" in done.stdout
