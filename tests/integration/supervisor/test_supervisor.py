"""The supervisor over real processes: restarts, adoption, one per run, and nothing left at the end."""

from __future__ import annotations

import asyncio
import errno
import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.job import Job, ReasoningGym, TinyModel
from rlboost_runtime.processes import identify, kill_tagged, process_start, tagged
from rlboost_runtime.run.folder import RunFolder, read_json, sweep_unfinished, write_json
from rlboost_runtime.run.reserved import RESERVED_MACHINE
from rlboost_runtime.run.security import create_secrets, read_token
from rlboost_runtime.supervisor import watched
from rlboost_runtime.supervisor.roles import Role
from rlboost_runtime.supervisor.supervisor import Supervisor, ask_to_stop
from rlboost_runtime.supervisor.watched import Tuning

pytestmark = pytest.mark.integration

NAP = "import time; time.sleep(600)"
CHILD_OF = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {!r}], start_new_session=True); "

# The real supervisor around a table of small roles: {name: [code, "life" | "work"]}.
HARNESS = """
import asyncio, json, logging, signal, sys
from pathlib import Path
from rlboost_runtime.logs import setup
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.supervisor.watched import Tuning
from rlboost_runtime.supervisor.roles import Role
from rlboost_runtime.supervisor.supervisor import Supervisor, only_supervisor

run = RunFolder(Path(sys.argv[1]))
table = json.loads(sys.argv[2])
setup("supervisor")

def role(name, code):
    wanted = (lambda: run.wanted.exists()) if name == "trainer" else (lambda: True)
    return Role(name, (sys.executable, "-c", code), may_start=wanted)

async def main():
    tuning = Tuning(backoff_s=0.05, backoff_limit_s=0.4, look_s=0.05, grace_s=2.0, stop_timeout_s=1.0)
    ended = lambda: (run.path / "machines_ended").touch()
    supervisor = Supervisor(run, [role(*item) for item in table.items()], ended, tuning)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.stop)
    await supervisor.serve()

with only_supervisor(run) as alone:
    if not alone:
        sys.exit("second")
    asyncio.run(main())
"""


class Supervised:
    def __init__(self, run: RunFolder, table: dict[str, str]) -> None:
        self.log = run.path / "supervisor.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", HARNESS, str(run.path), json.dumps(table)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stderr=log,
            )

    def events(self, name: str) -> list[dict]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "supervised")
    folder.path.mkdir()
    yield folder
    kill_tagged(folder.path)


@pytest.fixture
def supervise(run):
    started = []

    def begin(**table: str) -> Supervised:
        started.append(Supervised(run, table))
        return started[-1]

    yield begin
    for supervised in started:
        supervised.kill()


def wait_until(condition, timeout_s: float = 30.0):
    """Return what `condition` returned once that was true."""
    deadline = time.monotonic() + timeout_s
    while not (met := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return met


def process_of(run: RunFolder, role: str) -> psutil.Process | None:
    known = read_json(run.processes / f"{role}.json")
    try:
        return psutil.Process(known["pid"]) if known else None
    except psutil.NoSuchProcess:
        return None


def wait_for(run: RunFolder, role: str, *, other_than: int | None = None) -> psutil.Process:
    def there() -> psutil.Process | None:
        process = process_of(run, role)
        is_new = process is not None and process.pid != other_than
        return process if is_new and tagged(run.path, role=role) else None

    return wait_until(there)


def test_roles_are_started_tagged_with_an_identity_and_a_log(run, supervise):
    supervise(coordinator=f"print('hello', flush=True); {NAP}")
    process = wait_for(run, "coordinator")
    assert process.environ()["RLBOOST_RUN"] == str(run.path)
    assert read_json(run.processes / "coordinator.json")["start"] == process_start(process.pid)
    wait_until(lambda: (run.logs / "coordinator.log").read_text() == "hello\n")


def test_a_killed_role_comes_back_and_its_children_do_not_stay(run, supervise):
    supervise(coordinator=CHILD_OF.format(NAP) + NAP, weights=NAP)
    first = wait_for(run, "coordinator")
    weights = wait_for(run, "weights")
    wait_until(lambda: len(tagged(run.path, role="coordinator")) == 2)
    first.kill()
    wait_for(run, "coordinator", other_than=first.pid)
    wait_until(lambda: len(tagged(run.path, role="coordinator")) == 2)
    time.sleep(0.2)
    assert len(tagged(run.path, role="coordinator")) == 2
    assert wait_for(run, "weights").pid == weights.pid


def test_the_trainer_waits_until_it_is_wanted(run, supervise):
    supervise(coordinator=NAP, trainer=NAP)
    wait_for(run, "coordinator")
    time.sleep(0.3)
    assert tagged(run.path, role="trainer") == []
    write_json(run.wanted, {"train": True})
    wait_for(run, "trainer")


def test_a_new_supervisor_adopts_what_lives_and_sees_it_end(run, supervise):
    first = supervise(coordinator=NAP, weights=NAP)
    coordinator, weights = wait_for(run, "coordinator"), wait_for(run, "weights")
    first.kill()
    weights.kill()  # dies while nobody looks
    second = supervise(coordinator=NAP, weights=NAP)
    wait_for(run, "weights", other_than=weights.pid)
    wait_until(lambda: len(second.events("process.adopted")) == 1)
    assert process_of(run, "coordinator").pid == coordinator.pid
    assert len(tagged(run.path)) == 2
    coordinator.kill()
    wait_for(run, "coordinator", other_than=coordinator.pid)
    assert len(tagged(run.path, role="coordinator")) == 1


# The real trainer's way in, its imports included, up to where it would dial.
TRAINER = """
import pathlib, time
from rlboost_runtime.trainer import __main__ as trainer

class Client:
    @staticmethod
    def of_run(folder):
        time.sleep(2.5)
        (folder / "dials").touch()
        time.sleep(600)

trainer.RolloutClient = Client
trainer.main([str(pathlib.Path.cwd())])
"""


def test_a_trainer_that_took_long_to_start_is_adopted(run, supervise):
    job = Job(name=run.name, model=TinyModel(init="tiny"), data=ReasoningGym(reasoning_gym=["products"]))
    run.job_json.write_text(job.canonical_json())
    write_json(run.wanted, {"train": True})
    first = supervise(trainer=TRAINER)
    trainer = wait_for(run, "trainer")
    wait_until((run.path / "dials").exists, timeout_s=90.0)
    first.kill()
    second = supervise(trainer=TRAINER)
    wait_until(lambda: second.events("process.adopted") or len(second.events("process.started")) > 1)
    assert [event["pid"] for event in second.events("process.adopted")] == [trainer.pid]


def test_a_disk_that_takes_no_identity_does_not_cost_the_process(run, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watched, "write_json", full)
    process = watched.start(Role("coordinator", (sys.executable, "-c", NAP)), run)
    assert process.child is not None
    assert process.child.poll() is None
    process.child.kill()
    process.child.wait()


def test_a_full_disk_is_waited_for(run, supervise):
    disk = "import errno, os, pathlib, sys; full = pathlib.Path('full').exists(); "
    code = disk + "sys.exit(75) if full else __import__('time').sleep(600)"
    (run.path / "full").touch()
    supervised = supervise(coordinator=code)
    wait_until(lambda: len(supervised.events("process.ended")) >= 8)
    assert not run.outcome.exists()
    (run.path / "full").unlink()
    wait_for(run, "coordinator")


async def test_a_role_that_cannot_be_prepared_for_want_of_disk_is_tried_on(run):
    tries = 0

    def prepare() -> None:
        nonlocal tries
        tries += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    role = Role("agent-head-0", (sys.executable, "-c", NAP), prepare=prepare)
    tuning = Tuning(backoff_s=0.01, backoff_limit_s=0.02, look_s=0.05, grace_s=1.0, stop_timeout_s=1.0)
    supervisor = Supervisor(run, [role], lambda: None, tuning)
    serving = asyncio.ensure_future(supervisor.serve())
    await asyncio.wait({serving}, timeout=2.0)
    supervisor.stop()
    await serving
    assert tries >= 10
    assert not run.outcome.exists()


def test_a_foreign_process_under_an_old_number_is_not_adopted(run, supervise):
    run.processes.mkdir()
    me = psutil.Process()
    write_json(run.processes / "coordinator.json", {"pid": me.pid, "start": process_start(me.pid)})
    supervise(coordinator=NAP)
    wait_for(run, "coordinator", other_than=me.pid)


def test_what_a_killed_process_had_not_finished_to_write_is_deleted(run):
    run.processes.mkdir()
    old, new = run.path / ".status.json.3f36q6zy", run.processes / ".outcome.json.abcdefgh"
    others = [run.path / ".gitignore", run.path / "status.json", run.processes / ".reserve"]
    for path in (old, new, *others):
        path.write_text("{")
        os.utime(path, (1.0, 1.0))
    os.utime(new)
    assert sweep_unfinished(run) == 1
    assert not old.exists()
    assert all(path.exists() for path in (new, *others)), "somebody may be writing the young one"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system notes the start as it was")
def test_whoever_sets_the_wall_clock_makes_no_process_look_dead(run, supervise, monkeypatch):
    supervise(coordinator=NAP)
    process = wait_for(run, "coordinator")
    known = read_json(run.processes / "coordinator.json")
    boot, noted_before = psutil.boot_time(), psutil.Process(process.pid).create_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot + 100.0)  # as /proc/stat says then
    assert psutil.Process(process.pid).create_time() == pytest.approx(noted_before + 100.0)
    assert identify(known["pid"], known["start"], run.path) is not None


def test_a_second_supervisor_leaves_the_first_alone(run, supervise):
    supervise(coordinator=NAP)
    coordinator = wait_for(run, "coordinator")
    second = supervise(coordinator=NAP)
    assert second.process.wait(timeout=30) == 1  # the harness's word for it
    assert wait_for(run, "coordinator").pid == coordinator.pid


def test_the_command_itself_says_so_and_succeeds_as_a_second_one(run, supervise):
    supervise(coordinator=NAP)
    wait_for(run, "coordinator")
    done = subprocess.run(
        [sys.executable, "-m", "rlboost_runtime.supervisor", str(run.path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "has a supervisor already" in done.stderr


def test_what_killed_processes_leave_in_the_temporary_folder_goes_with_the_run(run, supervise, monkeypatch):
    system = run.path.with_name("system")
    system.mkdir()
    monkeypatch.setenv("TMPDIR", str(system))
    leaves = "import tempfile; tempfile.mkdtemp(prefix='torchelastic_'); "
    supervisor = supervise(coordinator=leaves + NAP, weights=NAP)
    process = wait_for(run, "coordinator")
    (run.processes / ".starting").touch()
    wait_until(lambda: list(system.glob("rlboost-*/torchelastic_*")))
    process.kill()
    wait_for(run, "coordinator", other_than=process.pid)
    wait_until(lambda: len(list(system.glob("rlboost-*/torchelastic_*"))) == 2)
    write_json(run.outcome, {"state": "done", "problem": "", "remedy": "", "exit_code": 0})
    supervisor.process.wait(30)
    assert list(system.iterdir()) == []
    assert [path.name for path in run.processes.iterdir()] == ["supervisor.lock"]


@pytest.mark.parametrize("cause", ["outcome", "signal"])
def test_nothing_is_left_at_the_end(run, supervise, cause):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    supervised = supervise(coordinator=CHILD_OF.format(NAP) + NAP, weights=stubborn + NAP, trainer=NAP)
    wait_for(run, "coordinator")
    wait_for(run, "weights")
    if cause == "outcome":
        write_json(run.outcome, {"state": "done", "problem": "", "remedy": "", "exit_code": 0})
    else:
        supervised.process.send_signal(signal.SIGTERM)
    assert supervised.process.wait(timeout=30) == 0
    assert tagged(run.path) == []
    assert list(run.processes.glob("*.json")) == []
    assert (run.path / "machines_ended").exists()
    assert run.outcome.exists() == (cause == "outcome")


def test_a_run_that_is_stopped_can_go_on(run, supervise):
    first = supervise(coordinator=NAP)
    wait_for(run, "coordinator")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(timeout=30) == 0
    supervise(coordinator=NAP)
    wait_for(run, "coordinator")


def test_a_role_that_crashes_again_and_again_ends_the_run(run, supervise):
    supervised = supervise(coordinator=NAP, weights="raise SystemExit(3)")
    assert supervised.process.wait(timeout=60) == 0
    outcome = read_json(run.outcome)
    assert outcome["state"] == "failed"
    assert outcome["exit_code"] == 1
    assert "weights ended 6 times in a row without progress, last with exit status 3" in outcome["problem"]
    assert str(run.logs / "weights.log") in outcome["problem"]
    assert outcome["remedy"]
    assert len(supervised.events("process.started")) == 7
    assert tagged(run.path) == []


def test_only_the_coordinator_is_started_again_while_the_run_ends(run, supervise):
    decided = {"state": "done", "problem": "", "remedy": "", "exit_code": 0, "warning": ""}
    supervised = supervise(coordinator=NAP, agent="import sys, time; time.sleep(1.5); sys.exit(3)")
    wait_for(run, "agent")
    coordinator = wait_for(run, "coordinator")
    write_json(run.ending, decided)
    coordinator.kill()
    wait_for(run, "coordinator", other_than=coordinator.pid)
    wait_until(lambda: "agent" in [end["process"] for end in supervised.events("process.ended")])
    time.sleep(1.0)
    assert tagged(run.path, role="agent") == []
    assert not run.outcome.exists()
    write_json(run.outcome, decided)
    assert supervised.process.wait(timeout=30) == 0
    assert read_json(run.outcome) == decided


def test_a_coordinator_that_cannot_wind_up_does_not_change_how_the_run_ended(run, supervise):
    write_json(run.ending, {"state": "done", "problem": "", "remedy": "", "exit_code": 0, "warning": ""})
    line = json.dumps(
        {"at": 1.5, "level": "error", "event": "fleet.broken", "problem": "the fleet is broken"}
    )
    supervised = supervise(coordinator=f"import sys; print({line!r}); sys.exit(3)")
    assert supervised.process.wait(timeout=60) == 0
    outcome = read_json(run.outcome)
    assert (outcome["state"], outcome["exit_code"]) == ("done", 0)
    assert "exit status 3: the fleet is broken; its log" in outcome["warning"]
    assert "{" not in outcome["warning"]


def test_a_role_that_no_restart_can_help_ends_the_run_in_its_own_words(run, supervise):
    code = (
        "import logging; from rlboost_runtime.logs import explain, setup\n"
        "from rlboost_runtime.errors import ConfigError\n"
        "setup('coordinator')\n"
        "explain(logging.getLogger('x'), ConfigError('trace.csv:3: time goes back', 'sort the rows'))\n"
        "raise SystemExit(78)"
    )
    supervised = supervise(coordinator=code, weights=NAP)
    assert supervised.process.wait(timeout=60) == 0
    assert read_json(run.outcome) == {
        "state": "failed",
        "problem": "trace.csv:3: time goes back",
        "remedy": "sort the rows",
        "exit_code": 2,
    }
    assert len([e for e in supervised.events("process.started") if e["process"] == "coordinator"]) == 1


@pytest.fixture
def front_door(run):
    """A TLS server with the run's own certificate, standing where the coordinator would."""
    create_secrets(run)
    asked: list[tuple[str, dict]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            allowed = self.headers["Authorization"] == f"Bearer {read_token(run)}"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if allowed:
                asked.append((self.path, body))
            self.send_response(202 if allowed else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(run.certificate, run.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    write_json(run.endpoint, {"url": f"https://127.0.0.1:{server.server_address[1]}"})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_coordinator_is_asked_to_end_the_run(run, front_door):
    assert ask_to_stop(run, "the trainer ended", "see its log")
    body = {"state": "failed", "problem": "the trainer ended", "remedy": "see its log", "exit_code": 1}
    assert front_door == [("/v1/stop", body)]


def test_a_coordinator_that_is_not_there_cannot_be_asked(run):
    create_secrets(run)
    assert not ask_to_stop(run, "x", "y")
    write_json(run.endpoint, {"url": "https://127.0.0.1:9"})
    assert not ask_to_stop(run, "x", "y")


def test_a_run_that_the_supervisor_ends_itself_costs_nothing_any_more(run, supervise):
    job = Job(
        name=run.name,
        model=TinyModel(init="tiny"),
        data=ReasoningGym(reasoning_gym=["basic_arithmetic"]),
    )
    run.job_json.write_text(job.canonical_json())
    books = Ledger(run.ledger)
    for machine in (RESERVED_MACHINE, "spot-0"):
        books.intend(
            MachineRecord(
                machine,
                pool="spot",
                provider="local",
                zone="z",
                accelerator="cpu",
                price_micro_usd_per_hour=1,
                price_source="",
                intended_at=1.0,
            )
        )
        books.launched(machine, time.time())
    books.close()
    supervised = supervise(coordinator="raise SystemExit(78)")
    assert supervised.process.wait(timeout=60) == 0
    assert read_json(run.outcome)["state"] == "failed"
    books = Ledger(run.ledger, read_only=True)
    assert books.open_machines() == []
    books.close()
