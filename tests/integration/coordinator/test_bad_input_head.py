"""What may befall a run on its head: a full disk, no memory, a port that another program took.

Each ends the run, if it must, with words, with the right exit code, and with nothing running or billed; and
the run can be resumed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.coordinator import service
from rlboost_runtime.coordinator.service import Coordinator, DiskPatienceOver
from rlboost_runtime.job import Job, Rollout, Spot, TinyModel
from rlboost_runtime.job import ReasoningGym as Gym
from rlboost_runtime.job import Trainer as Reserved
from rlboost_runtime.processes import kill_tagged, tagged
from rlboost_runtime.run.create import reopen
from rlboost_runtime.run.folder import RunFolder, read_json, reserve, write_json, write_outcome
from rlboost_runtime.run.security import create_secrets
from rlboost_runtime.seams import SystemClock, SystemDisk
from rlboost_runtime.weights.serve.server import bind as bind_weights

pytestmark = pytest.mark.integration

NAP = "import time; time.sleep(600)"

# The real supervisor with little patience, in a process of its own, around a table of roles: {name: command}.
HARNESS = """
import asyncio, json, sys
from pathlib import Path
from rlboost_runtime.logs import setup
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.supervisor.watched import Tuning
from rlboost_runtime.supervisor.roles import Role
from rlboost_runtime.supervisor.supervisor import Supervisor

setup("supervisor")
run = RunFolder(Path(sys.argv[1]))
roles = [Role(name, tuple(command)) for name, command in json.loads(sys.argv[2]).items()]
tuning = Tuning(backoff_s=0.01, backoff_limit_s=0.05, look_s=0.02, grace_s=2.0, stop_timeout_s=1.0,
                crashes=2, kills=4, disk_patience_s=0.3)
asyncio.run(Supervisor(run, roles, lambda: print("machines ended"), tuning).serve())
"""


def supervise(run: RunFolder, **roles: Sequence[str]) -> None:
    """Supervise until the supervisor leaves of its own accord, having ended machines and processes."""
    done = subprocess.run(
        [sys.executable, "-c", HARNESS, str(run.path), json.dumps(roles)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "machines ended" in done.stdout
    assert tagged(run.path) == []


def python(code: str) -> Sequence[str]:
    return (sys.executable, "-S", "-c", code)


@pytest.fixture
def run(tmp_path: Path):
    folder = RunFolder(tmp_path / "demo")
    folder.processes.mkdir(parents=True)
    yield folder
    kill_tagged(folder.path)


@pytest.fixture
def small(tmp_path: Path, mount: Callable[..., Path]) -> RunFolder:
    """A run on a small disk of its own."""
    folder = RunFolder(mount(tmp_path / "disk", 4096) / "runs" / "demo")
    folder.processes.mkdir(parents=True)
    return folder


# --- a full disk -------------------------------------------------------------------------------------------


def test_a_disk_that_stays_full_ends_the_run_in_words(small: RunFolder, fill: Any) -> None:
    job(small)
    create_secrets(small)
    reserve(small)
    fill(small.path.parents[1])
    supervise(small, coordinator=python("raise SystemExit(75)"), weights=python(NAP))
    outcome = read_json(small.outcome)
    told = f"the disk of {small.path} is full or fails: the coordinator could not write for too long"
    assert outcome["problem"].startswith(told)
    assert outcome["remedy"].startswith("make room there, then type rlboost launch demo --resume")
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 1)
    reopen(small)
    assert not small.outcome.exists()  # it can be resumed


def test_without_room_for_the_outcome_everything_ends_and_the_run_stays_open(
    small: RunFolder, fill: Any
) -> None:
    taken = fill(small.path.parents[1])  # before the reserve could be taken
    supervise(small, coordinator=python("raise SystemExit(74)"), weights=python(NAP))
    assert not small.outcome.exists()
    taken.unlink()
    supervise(small, coordinator=python("raise SystemExit(74)"))  # as `launch demo` would
    assert read_json(small.outcome)["state"] == "failed"


def test_the_outcome_finds_room_on_a_full_disk_once(small: RunFolder, fill: Any) -> None:
    reserve(small)
    fill(small.path.parents[1])
    with pytest.raises(OSError, match="No space left"):
        write_json(small.status, {"state": "rollout"})
    assert write_outcome(small, {"state": "failed"})
    assert read_json(small.outcome) == {"state": "failed"}
    fill(small.path.parents[1])
    assert not write_outcome(small, {"state": "failed", "problem": "x" * 100_000})
    assert read_json(small.outcome) == {"state": "failed"}  # the former one, whole


class RefusingDisk(SystemDisk):
    """A disk that takes no records of the journal."""

    def write(self, fd: int, data: bytes) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data)


async def test_a_journal_that_cannot_be_written_is_told_and_waited_for_only_so_long(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DISK_PATIENCE_S", 1.5)
    create_secrets(run)
    coordinator = Coordinator(run, job(run), SystemClock(), RefusingDisk())
    coordinator._driver.journal.open_step(0, fresh=True)
    coordinator._driver.journal.append(b"tokens")
    began = time.monotonic()
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as error:
            await coordinator.serve()
    assert error.value.subgroup(DiskPatienceOver) is not None
    assert time.monotonic() - began > 1.5
    status = read_json(run.status)
    assert "No space left on device" in status["journal_problem"]
    told = [event["text"] for event in status["events"] if event["kind"] == "disk"]
    assert len(told) == 1
    assert told[0].startswith("the run waits for its disk (journal: No space left on device")


# --- no memory ---------------------------------------------------------------------------------------------


def test_a_role_that_is_killed_again_and_again_ends_the_run(run: RunFolder) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    supervise(run, trainer=python(code), weights=python(NAP))
    outcome = read_json(run.outcome)
    told = "the trainer was killed 4 times in a row without progress (SIGKILL, most likely out of memory)"
    assert outcome["problem"].startswith(told)
    assert outcome["remedy"].startswith("free some memory, or lower algorithm.micro_batch_responses")
    assert outcome["remedy"].endswith(f"rlboost launch {run.name} --resume")
    assert (outcome["state"], outcome["exit_code"]) == ("failed", 1)
    assert tagged(run.path) == []


def test_a_role_that_crashes_is_told_with_the_last_line_of_its_log(run: RunFolder) -> None:
    supervise(run, weights=python("raise KeyError('colour')"))
    problem = read_json(run.outcome)["problem"]
    assert problem.startswith("the weights ended 2 times in a row without progress, last with exit status 1")
    assert f": KeyError: 'colour'; its log is {run.logs / 'weights.log'}" in problem


# --- a port that is taken ----------------------------------------------------------------------------------


def job(run: RunFolder) -> Job:
    made = Job(
        name=run.name,
        model=TinyModel(init="tiny"),
        data=Gym(reasoning_gym=["basic_arithmetic"]),
        trainer=Reserved(local_engines=1),
        rollout=Rollout(spot=Spot(max_instances=0)),
    )
    run.job_json.write_text(made.canonical_json())
    return made


@pytest.mark.parametrize(
    ("name", "module", "endpoint"),
    [
        ("coordinator", "rlboost_runtime.coordinator", "endpoint"),
        ("weight server", "rlboost_runtime.weights.serve.server", "weights_endpoint"),
    ],
)
def test_a_port_that_is_taken_ends_the_run_and_a_resumed_one_takes_another(
    run: RunFolder, name: str, module: str, endpoint: str
) -> None:
    create_secrets(run)
    job(run)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        write_json(getattr(run, endpoint), {"url": f"https://127.0.0.1:{port}"})
        supervise(run, it=(sys.executable, "-m", module, str(run.path)))
        outcome = read_json(run.outcome)
        assert outcome["problem"] == f"port {port} of the {name} of run demo is taken by another program"
        assert outcome["remedy"].startswith("type rlboost launch demo --resume: it continues")
        assert (outcome["state"], outcome["exit_code"]) == ("failed", 1)

        reopen(run)
        assert not getattr(run, endpoint).exists()
        listener = service.bind(run) if name == "coordinator" else bind_weights(run)
        with listener:
            assert listener.getsockname()[1] != port
