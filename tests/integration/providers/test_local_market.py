"""The local cloud on real processes: the market kills by itself; files keep what the next process needs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from rlboost_providers.base.provider import LaunchRequest, MachineStatus, Offer
from rlboost_providers.local.machines import LocalMachine, LocalMachines
from rlboost_providers.local.provider import LocalProvider
from rlboost_runtime.errors import ConfigError, NoCapacity
from rlboost_runtime.job import Job, LocalOffer, Market, ReasoningGym, Rollout, Spot, TinyModel
from rlboost_runtime.processes import kill_tagged, tagged, tags
from rlboost_runtime.run.folder import RunFolder

pytestmark = pytest.mark.integration

NAP = "import time; time.sleep(600)"
WITNESS = """
import os, pathlib, signal, sys, time
def on_term(*_):
    pathlib.Path("told_by_signal").touch()
signal.signal(signal.SIGTERM, on_term)
pathlib.Path("up").touch()
while True:
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "market-run")
    folder.path.mkdir()
    yield folder
    kill_tagged(folder.path)


def provider_of(
    run: RunFolder, market: Market | None, code: str = NAP, max_instances: int = 3
) -> LocalProvider:
    offers = [LocalOffer(infra="local", price_usd_per_hour=1.0, market=market)]
    job = Job(
        name=run.name,
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
        rollout=Rollout(spot=Spot(any_of=offers, max_instances=max_instances)),
    )
    run.job_json.write_text(job.canonical_json())
    command = [sys.executable, "-c", code]
    return LocalProvider(run.path, offers, max_instances=max_instances, command=lambda *_: command)


def request_for(run: RunFolder, machine: str) -> LaunchRequest:
    offer = Offer("local", "local-0", "cpu", 1_000_000, True, "test")
    return LaunchRequest(run.name, machine, offer, {"instances": [f"{machine}/0"], "token": "hush-hush"})


class MarketProcess:
    def __init__(self, run: RunFolder) -> None:
        self.log = (run.path / "market.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlboost_providers.local.market", str(run.path)],
            env={**os.environ, **tags(run.path), "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=self.log,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def __enter__(self) -> MarketProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def told(run: RunFolder) -> list[dict]:
    path = run.cloud / "market.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def state(provider: LocalProvider, run: RunFolder, machine: str) -> MachineStatus:
    return next(view.state for view in provider.describe(run.name) if view.machine == machine)


def up(run: RunFolder, *machines: str) -> bool:
    return all((run.cloud / "machines" / machine / "up").exists() for machine in machines)


def test_secrets_of_a_machine_are_private_and_its_logs_lie_with_the_run(run):
    provider = provider_of(run, None, code="print('hello', flush=True); " + NAP)
    provider.launch(request_for(run, "spot-0"))
    bootstrap = run.cloud / "machines" / "spot-0" / "bootstrap.json"
    assert stat.S_IMODE(bootstrap.stat().st_mode) == 0o600
    assert json.loads(bootstrap.read_text())["token"] == "hush-hush"
    log = run.logs / "machines" / "spot-0" / "agent-0.log"
    wait_until(lambda: log.read_text() == "hello\n")
    [process] = tagged(run.path, machine="spot-0")
    assert "hush-hush" not in " ".join([*process.cmdline(), *process.environ().values()])
    assert process.cwd() == str(bootstrap.parent)


def test_a_machine_knows_nothing_of_its_launchers_environment(run, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-head")
    monkeypatch.setenv("RLBOOST_ROLE", "coordinator")
    provider_of(run, None).launch(request_for(run, "spot-0"))
    [process] = tagged(run.path, machine="spot-0")
    assert {"AWS_SECRET_ACCESS_KEY", "RLBOOST_ROLE"}.isdisjoint(process.environ())
    assert process.environ()["RLBOOST_RUN"] == str(run.path)


def test_machine_ids_cannot_leave_their_folder(run):
    with pytest.raises(ConfigError, match="no plain name"):
        provider_of(run, None).launch(request_for(run, "../escape"))
    assert not tagged(run.path)


def test_an_ended_machine_leaves_no_zombie(run):
    provider = provider_of(run, None, code="pass")
    provider.launch(request_for(run, "spot-0"))
    pid = LocalMachines(run).all()[0].processes[0].pid
    wait_until(lambda: state(provider, run, "spot-0") is MachineStatus.GONE)
    provider.describe(run.name)
    wait_until(lambda: provider.describe(run.name) and not psutil.pid_exists(pid))


def test_a_launch_whose_launcher_died_is_completed_by_the_same_id_and_undone_otherwise(run):
    provider = provider_of(run, None)
    machines = LocalMachines(run)
    for machine in ("spot-0", "spot-1"):  # as a launcher leaves it that dies right after the first process
        folder = machines.folder(machine)
        folder.mkdir(parents=True)
        (folder / "bootstrap.json").write_text("{}")
        record = LocalMachine(run.name, machine, "local-0", (f"{machine}/0",), intended_at=time.time())
        machines.write(record)
        machines.start(record, {f"{machine}/0": [sys.executable, "-c", NAP]})
    left_over = tagged(run.path, machine="spot-0")
    assert provider.launch(request_for(run, "spot-0")).state is MachineStatus.RUNNING
    assert len(tagged(run.path, machine="spot-0")) == 1
    assert not left_over[0].is_running()
    [completed, undone] = provider.describe(run.name)
    assert completed.state is MachineStatus.RUNNING
    assert (undone.state, undone.started_at) == (MachineStatus.GONE, None), "never billed"
    assert not tagged(run.path, machine="spot-1")


def test_a_market_gives_no_more_machines_than_it_has_and_says_when_to_ask_again(run):
    market = Market(seed=3, mean_lifetime_s=600, mean_absence_s=600)
    provider = provider_of(run, market, max_instances=2)
    provider.launch(request_for(run, "spot-0"))
    provider.launch(request_for(run, "spot-1"))
    assert provider.offers() == []
    with pytest.raises(NoCapacity):
        provider.launch(request_for(run, "spot-2"))
    provider.terminate(run.name, "spot-1")
    provider.launch(request_for(run, "spot-3"))  # a place that we gave back is there at once
    provider.preempt(run.name, "spot-0", None)
    with pytest.raises(NoCapacity) as caught:  # one that was taken is not
        provider.launch(request_for(run, "spot-4"))
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 1
    assert {view.machine for view in provider.describe(run.name)} == {"spot-0", "spot-1", "spot-3"}


def test_the_market_kills_when_time_is_up_though_its_launcher_is_dead(run):
    market = Market(seed=1, mean_lifetime_s=1.0, mean_absence_s=0.1, notice_fraction=0)
    code = (
        "import subprocess, sys; from test_local_market import *; run = RunFolder(Path(sys.argv[1]))\n"
        "provider_of(run, Market.model_validate_json(sys.argv[2])).launch(request_for(run, 'spot-0'))"
    )
    here = [str(Path(__file__).parent), *sys.path]
    subprocess.run(
        [sys.executable, "-c", code, str(run.path), market.model_dump_json()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(here)},
        check=True,
        timeout=30,
    )
    record = LocalMachines(run).all()[0]
    assert record.reclaim_at is not None
    with MarketProcess(run):
        wait_until(lambda: bool(told(run)))
        assert not tagged(run.path, machine="spot-0")
    [line] = told(run)
    assert (line["machine"], line["kind"], line["by"]) == ("spot-0", "kill", "market")
    assert line["at"] >= record.reclaim_at


def test_warnings_alternate_between_signal_and_file_and_are_followed_by_a_kill(run):
    market = Market(seed=1, mean_lifetime_s=2.0, mean_absence_s=0, notice_fraction=1, notice_s=0.4)
    provider = provider_of(run, market, code=WITNESS, max_instances=2)
    for machine in ("spot-0", "spot-1"):
        provider.launch(request_for(run, machine))
    wait_until(lambda: up(run, "spot-0", "spot-1"))
    with MarketProcess(run):
        wait_until(lambda: sum(line["kind"] == "kill" for line in told(run)) == 2)
    by_machine = {m: [line for line in told(run) if line["machine"] == m] for m in ("spot-0", "spot-1")}
    for lines in by_machine.values():
        assert [line["kind"] for line in lines] == ["notice", "kill"]
        assert lines[0]["seconds"] == 0.4
        assert lines[1]["at"] - lines[0]["at"] >= 0.399
    first, second = [line["machine"] for line in told(run) if line["kind"] == "notice"]
    folders = run.cloud / "machines"
    assert (folders / first / "told_by_signal").exists()
    assert not (folders / first / "notice.json").exists()
    assert not (folders / second / "told_by_signal").exists()
    assert json.loads((folders / second / "notice.json").read_text())["seconds"] == 0.4
    assert not tagged(run.path, machine=first)


def test_a_market_killed_between_warning_and_kill_finishes_when_started_again(run):
    market = Market(seed=1, mean_lifetime_s=0.5, mean_absence_s=0, notice_fraction=1, notice_s=1.5)
    provider = provider_of(run, market, code=WITNESS, max_instances=1)
    provider.launch(request_for(run, "spot-0"))
    wait_until(lambda: up(run, "spot-0"))
    first = MarketProcess(run)
    wait_until(lambda: bool(told(run)))
    first.kill()
    assert state(provider, run, "spot-0") is MachineStatus.RUNNING
    with MarketProcess(run):
        wait_until(lambda: len(told(run)) == 2)
    assert [line["kind"] for line in told(run)] == ["notice", "kill"]


def test_a_trace_decides_by_the_time_since_the_first_launch(run):
    run.files.mkdir()
    (run.files / "trace.csv").write_text("1000,add,a\n1000,add,b\n2500,remove,a\n3500,add,c\n")
    provider = provider_of(run, Market(trace="trace.csv", notice_fraction=0))
    began = provider.launch(request_for(run, "spot-0")).started_at
    provider.launch(request_for(run, "spot-1"))
    with pytest.raises(NoCapacity) as caught:
        provider.launch(request_for(run, "spot-2"))
    assert caught.value.retry_after_s == pytest.approx(began + 2.5 - time.time(), abs=0.3)
    with MarketProcess(run):
        wait_until(lambda: bool(told(run)))
    [line] = told(run)
    assert line["machine"] == "spot-0"
    assert line["at"] >= began + 1.5
    wait_until(lambda: provider.offers() != [])
    assert time.time() >= began + 2.5
    assert provider.launch(request_for(run, "spot-2")).state is MachineStatus.RUNNING
    assert LocalMachines(run).read("spot-2").node == "c"


def test_a_bad_trace_ends_the_market_for_good(run):
    provider_of(run, Market(seed=1))
    job = json.loads(run.job_json.read_text())
    job["rollout"]["spot"]["any_of"][0]["market"]["trace"] = "absent.csv"
    run.job_json.write_text(json.dumps(job))
    market = MarketProcess(run)
    assert market.process.wait(timeout=20) == 78
    market.log.close()
    assert "absent.csv: no such file" in (run.path / "market.log").read_text()


def test_records_survive_a_round_trip(run):
    provider = provider_of(run, Market(seed=1))
    provider.launch(request_for(run, "spot-0"))
    provider.preempt(run.name, "spot-0", None)
    [record] = LocalMachines(run).all()
    assert msgspec.json.decode(msgspec.json.encode(record), type=LocalMachine) == record
    assert record.reclaim is not None
    assert record.ended_at is not None


def test_an_ended_machine_leaves_no_token_and_no_weights(run):
    provider = provider_of(run, None)
    provider.launch(request_for(run, "spot-0"))
    folder = run.cloud / "machines" / "spot-0"
    (folder / "weights" / "0").mkdir(parents=True)
    (folder / "weights" / "0" / "part").write_bytes(b"w")
    (folder / "engine-1.tokens").touch()
    provider.terminate(run.name, "spot-0")
    assert not (folder / "bootstrap.json").exists()
    assert not (folder / "weights").exists()
    assert (folder / "engine-1.tokens").exists()
    assert (run.logs / "machines" / "spot-0" / "agent-0.log").exists()
    assert state(provider, run, "spot-0") is MachineStatus.GONE


def test_a_machine_does_not_inherit_its_launchers_secrets(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    provider = provider_of(run, None)
    provider.launch(request_for(run, "spot-0"))
    [process] = tagged(run.path, machine="spot-0")
    environment = process.environ()
    assert "HF_TOKEN" not in environment
    assert environment["HF_HOME"] == "/somewhere"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
