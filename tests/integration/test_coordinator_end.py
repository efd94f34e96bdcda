"""How a coordinator ends: once that is decided, a restart only winds up; errors keep their words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlboost_runtime.coordinator.ledger import Ledger
from rlboost_runtime.coordinator.service import Coordinator
from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.job import Job, LocalOffer, ReasoningGym, Rollout, Spot, TinyModel
from rlboost_runtime.process_tags import kill_tagged
from rlboost_runtime.run_folder import RunFolder, read_json, write_json
from rlboost_runtime.seams import SystemClock, SystemDisk
from rlboost_runtime.security import create_secrets

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


async def test_a_restart_while_the_run_ends_only_winds_up(run: RunFolder) -> None:
    write_json(run.ending, {"state": "budget", "problem": "spent", "remedy": "raise it", "exit_code": 5})
    async with asyncio.timeout(30):
        await coordinator_of(run, 2).serve()
    assert read_json(run.outcome) == {
        "state": "stopped",
        "problem": "spent",
        "remedy": "raise it",
        "exit_code": 5,
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


async def test_an_error_that_can_be_explained_leaves_as_itself(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: object) -> None:
        raise RuntimeFault("the fleet is broken", "mend it")

    monkeypatch.setattr("rlboost_runtime.coordinator.fleet.Fleet._watch", broken)
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeFault, match="the fleet is broken"):
            await coordinator_of(run, 0).serve()
