from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlboost_runtime.processes import await_tags, end_all, run_environment, tagged

pytestmark = pytest.mark.integration

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
PARENT = (
    "import subprocess, sys;"
    f" subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True,"
    " stdout=subprocess.DEVNULL);"
    " print('up', flush=True)"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(started: list[subprocess.Popen[bytes]], run: Path, code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], env=run_environment(run), stdout=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_only_the_runs_own_processes_are_found_and_ended(tmp_path: Path, started) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    first, second = start(started, mine, SLEEP), start(started, mine, SLEEP)
    bystander = start(started, other, SLEEP)
    assert {p.pid for p in tagged(mine)} == {first.pid, second.pid}
    began = time.monotonic()
    assert sorted(end_all(mine, 30.0)) == sorted([first.pid, second.pid])
    assert time.monotonic() - began < 15  # SIGTERM was enough
    assert tagged(mine) == []
    assert end_all(mine, 5.0) == []
    assert bystander.poll() is None


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path, started) -> None:
    process = start(started, tmp_path, STUBBORN)
    began = time.monotonic()
    assert end_all(tmp_path, 0.3) == [process.pid]
    assert process.wait(5) == -9
    assert 0.3 <= time.monotonic() - began < 5


def test_a_detached_grandchild_is_found_after_its_parent_died(tmp_path: Path, started) -> None:
    parent = start(started, tmp_path, PARENT)
    parent.wait(5)
    (orphan,) = tagged(tmp_path)
    assert orphan.pid != parent.pid
    assert end_all(tmp_path, 5.0) == [orphan.pid]
    assert not psutil.pid_exists(orphan.pid) or orphan.status() == psutil.STATUS_ZOMBIE


def test_the_caller_and_its_ancestors_are_spared(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, subprocess; from rlboost_runtime.processes import end_all;"
        "inner = 'import sys, pathlib; from rlboost_runtime.processes import end_all;"
        " print(end_all(pathlib.Path(sys.argv[1]), 1.0))';"
        "print(subprocess.run([sys.executable, '-c', inner, sys.argv[1]], check=True, text=True,"
        " capture_output=True).stdout.strip())"
    )
    environment = run_environment(tmp_path) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    outer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (outer.returncode, outer.stdout.strip()) == (0, "[]"), outer.stderr


def test_a_process_that_its_kernel_has_not_laid_out_yet_is_waited_for(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """As on a machine so busy that a new program's environment cannot be read for a while."""
    tagged_late = f"sleep 0.4; exec env RLBOOST_RUN={tmp_path} sleep 60"
    environment = {name: value for name, value in os.environ.items() if name != "RLBOOST_RUN"}
    process = subprocess.Popen(["bash", "-c", tagged_late], env=environment, stdout=subprocess.PIPE)
    started.append(process)
    assert tagged(tmp_path) == []
    await_tags(process.pid)
    assert [found.pid for found in tagged(tmp_path)] == [process.pid]


def test_nobody_waits_for_the_tags_of_a_process_that_ended() -> None:
    with subprocess.Popen(["true"]) as process:
        began = time.monotonic()
        await_tags(process.pid)
        await_tags(process.pid, timeout_s=0.1)
        assert time.monotonic() - began < 5
