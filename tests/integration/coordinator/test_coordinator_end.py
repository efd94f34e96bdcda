"""How a coordinator ends: once that is decided, a restart only winds up; errors keep their words."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fastapi import FastAPI, WebSocket
from websockets.asyncio.client import connect

from rlboost_providers.local.provider import LocalProvider
from rlboost_runtime.agent.service import ExitCode, _exit_code
from rlboost_runtime.billing.books import unsettled
from rlboost_runtime.billing.launch_records import HeadMachine, MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.coordinator.links.server import bind, make_server
from rlboost_runtime.coordinator.service import Coordinator
from rlboost_runtime.coordinator.status import fleet_facts
from rlboost_runtime.errors import CredentialsRejected, RuntimeFault
from rlboost_runtime.health.monitor import FleetFacts
from rlboost_runtime.job import Job, LocalOffer, ReasoningGym, Rollout, Spot, TinyModel
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.protocol.session import RunIsOver
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.security import client_context, create_secrets
from rlboost_runtime.seams import SystemClock, SystemDisk
from rlboost_runtime.supervisor.machines import end_machines

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path: Path):
    folder = RunFolder(tmp_path / "ending")
    folder.path.mkdir()
    create_secrets(folder)
    yield folder
    kill_tagged(folder.path)


def coordinator_of(run: RunFolder, max_instances: int) -> Coordinator:
    offers = [LocalOffer(infra="local", price_usd_per_hour=1.0)]
    job = Job(
        name=run.name,
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(spot=Spot(any_of=offers, max_instances=max_instances)),
    )
    run.job_json.write_text(job.canonical_json())
    return Coordinator(run, job, SystemClock(), SystemDisk())


def intent(machine: str, provider: str) -> MachineRecord:
    return MachineRecord(
        machine,
        provider,
        "zone",
        "cpu",
        price_micro_usd_per_hour=1,
        price_source="test",
        intended_at=time.time(),
    )


def books_opened(run: RunFolder) -> None:
    coordinator = coordinator_of(run, 1)
    coordinator._open_books()
    coordinator._ledger.close()


@pytest.mark.parametrize("is_rented", [True, False])
def test_the_head_is_billed_between_a_runs_end_and_its_resumption_where_it_is_rented(
    tmp_path: Path, is_rented: bool
) -> None:
    run = RunFolder(tmp_path / "home" / "runs" / "demo")
    run.logs.mkdir(parents=True)
    hour, now = 3600.0, time.time()
    if is_rented:
        head = HeadMachine("head-1", "aws", "us-east-2a", "A10G:1", 36_000_000, "t", now - 11 * hour)
        write_json(run.path.parents[1] / "rental.json", asdict(replace(head, launched_at=now - 11 * hour)))
    books_opened(run)
    ledger = Ledger(run.ledger)
    first = ledger.machines(now)[0].launched_at
    assert first is not None
    ledger.ended("reserved-0", first if not is_rented else now - 10 * hour)
    books_opened(run)
    (bill,) = ledger.machines(now + hour)
    ledger.close()
    hours = 12 if is_rented else 1
    assert bill.billed_ns / 3600e9 == pytest.approx(hours, abs=0.01)
    assert bill.ended_at is None, "it is billed on"


async def test_a_restart_while_the_run_ends_only_winds_up(run: RunFolder) -> None:
    write_json(run.ending, {"state": "budget", "problem": "spent", "remedy": "raise it", "exit_code": 5})
    async with asyncio.timeout(30):
        await coordinator_of(run, 2).serve()
    assert read_json(run.outcome) == {
        "state": "stopped",
        "problem": "spent",
        "remedy": "raise it",
        "exit_code": 5,
        "warning": "",
    }
    assert not (run.cloud / "machines").exists()
    books = Ledger(run.ledger, read_only=True)
    assert books.open_machines() == []
    assert [bill.machine for bill in books.machines(1e10)] == ["reserved-0"]
    books.close()


async def test_the_decision_to_end_is_on_disk_before_anything_is_ended(run: RunFolder) -> None:
    coordinator = coordinator_of(run, 0)
    coordinator.end_run("done", "", "")
    assert read_json(run.ending)["state"] == "done"
    assert not run.outcome.exists()
    async with asyncio.timeout(30):
        await coordinator.serve()
    assert read_json(run.outcome)["state"] == "done"


@pytest.mark.parametrize(("state", "exit_code"), [("done", 0), ("budget", 5), ("failed", 1)])
async def test_a_cloud_that_cannot_be_asked_is_a_warning_and_not_the_outcome(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, state: str, exit_code: int
) -> None:
    def rejected(self: object, run: str) -> None:
        raise CredentialsRejected("the credentials have expired", "renew them")

    coordinator = coordinator_of(run, 0)
    monkeypatch.setattr(LocalProvider, "describe", rejected)
    monkeypatch.setattr("rlboost_runtime.coordinator.fleet.controller.REJECTED_S", 0.2)
    coordinator._ledger.intend(intent("spot-0", "local"))
    coordinator._ledger.launched("spot-0", time.time())
    coordinator.end_run(state, "", "")
    async with asyncio.timeout(30):
        await coordinator.serve()
    outcome = read_json(run.outcome)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped" if state == "budget" else state, exit_code)
    assert outcome["warning"] == "the cloud could not be asked about spot-0: the credentials have expired"
    assert [bill.machine for bill in unsettled(run)] == ["spot-0"]


async def test_a_cloud_without_any_intent_is_not_asked_at_the_end(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    coordinator = coordinator_of(run, 0)
    monkeypatch.setattr(LocalProvider, "describe", lambda self, run: asked.append(run))
    coordinator.end_run("done", "", "")
    async with asyncio.timeout(30):
        await coordinator.serve()
    assert read_json(run.outcome)["warning"] == ""
    assert end_machines(coordinator._job, run).machines == ()
    assert asked == []


async def test_an_agent_is_refused_at_the_end_without_an_error(run: RunFolder) -> None:
    coordinator = coordinator_of(run, 0)
    coordinator._agents.stop_all("done")
    refusal = coordinator._agents._refusal(None)
    assert refusal.is_run_over
    assert not refusal.retry
    coordinator._ledger.close()
    assert _exit_code(ExceptionGroup("", [RunIsOver(refusal.problem, "")])) == ExitCode.DONE


async def test_a_peer_that_is_closing_its_connection_does_not_disturb_the_end(run: RunFolder) -> None:
    app = FastAPI()

    @app.websocket("/")
    async def accept(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive()

    server = make_server(app, run)
    with bind(run) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        trust = client_context(run.certificate.read_text())
        peer = await connect(f"wss://127.0.0.1:{listener.getsockname()[1]}/", ssl=trust, proxy=None)
        peer.transport.pause_reading()  # its side of TLS stays open, so the server's connection keeps closing
        peer.protocol.send_close(1000)
        peer.transport.write(b"".join(peer.protocol.data_to_send()))
        [connection] = server.server_state.connections
        async with asyncio.timeout(5):
            while not connection.transport.is_closing():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            server.should_exit = True
            while server.servers[0].is_serving():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            peer.transport.abort()
            await serving


async def test_an_error_that_can_be_explained_leaves_as_itself(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object) -> None:
        raise RuntimeFault("the fleet is broken", "mend it")

    monkeypatch.setattr("rlboost_runtime.coordinator.fleet.controller.FleetController._watch", broken)
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeFault, match="the fleet is broken"):
            await coordinator_of(run, 0).serve()


async def test_warnings_on_the_bill_are_noted_and_shown_until_the_run_ends(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinator_of(run, 2)
    real = fleet_facts(coordinator._sources, time.time())
    assert (real.steps, real.connected, real.is_rolling_out, real.saving_fraction) == (0, 0, False, None)
    steps = iter(range(10, 100))

    def losing(sources: object, now: float) -> FleetFacts:
        return replace(real, steps=next(steps), saving_fraction=-0.4)

    monkeypatch.setattr("rlboost_runtime.coordinator.service.fleet_facts", losing)
    for _ in range(6):
        coordinator._check_health()
    coordinator._write_status()
    noted = [event.text for event in coordinator._ledger.events() if event.kind == "warning"]
    assert noted == ["warning spot_does_not_pay: Spot does not pay: saving -40.0% since step 10 (limit 0%)."]
    (warning,) = read_json(run.status)["warnings"]
    assert warning["code"] == "spot_does_not_pay"
    coordinator.end_run("done", "", "")
    coordinator._check_health()
    assert next(steps) == 16, "a run that is wound up has no fleet to judge"
    coordinator._ledger.close()


def test_revoking_bills_nothing_and_misses_no_machine(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Ledger(run.ledger)
    for machine in ("spot-0", "spot-1", "spot-2"):
        before.intend(intent(machine, "local"))
    before.ended("spot-0", time.time())
    before.close()
    coordinator = coordinator_of(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "machines", lambda *_: pytest.fail("every machine was billed"))
        coordinator._revoke()
        assert coordinator._known_revoked == {"spot-0"}
        coordinator._ledger.ended("spot-1", time.time())
        patched.setattr(coordinator._revoked, "add", lambda _: (_ for _ in ()).throw(OSError("full")))
        coordinator._revoke()
        assert coordinator._known_revoked == {"spot-0", "spot-1"}
        patched.undo()
    assert read_json(run.path / "revoked.json") == ["spot-0"]
    coordinator._revoke()
    assert read_json(run.path / "revoked.json") == ["spot-0", "spot-1"], "tried again"
    coordinator._ledger.close()
