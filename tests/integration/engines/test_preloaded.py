"""Engines forked from a process that has torch imported: quick, tagged, and gone with their machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlboost_runtime.engines.transformers import preloaded
from rlboost_runtime.processes import kill_tagged, room_for_tag, tagged, tags

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="tags are rewritten in place on Linux alone"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    environment = {**os.environ, **tags(folder), **room_for_tag()}
    command = [sys.executable, "-m", preloaded.__name__, str(folder / "s")]
    with subprocess.Popen(command, env=environment) as process:
        yield folder
        (folder / "outcome.json").touch()
        process.wait(20)


def forked(run: Path, machine: str) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs, (run / "log").open("ab") as log:
        return preloaded.ask(run / "s", machine, theirs.fileno(), log.fileno()), ours


def test_a_forked_engine_is_found_and_killed_as_its_machines(run: Path) -> None:
    (pid, first), (other, second) = forked(run, "spot-1"), forked(run, "spot-" + "2" * 58)
    with first, second:
        assert [process.pid for process in tagged(run, machine="spot-1")] == [pid]
        assert kill_tagged(run, machine="spot-1") == 1
        assert [process.pid for process in tagged(run) if process.pid in (pid, other)] == [other]


def test_a_forked_engine_ends_with_its_agents_end_of_the_socket(run: Path) -> None:
    pid, link = forked(run, "spot-3")
    assert os.getsid(pid) == pid
    link.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_where_no_such_process_is_the_engine_starts_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloaded, "REACH_TIMEOUT_S", 0.0)
    with pytest.raises(preloaded.NoChild):
        preloaded.ask(tmp_path / "s", "spot-1", 0, 1)
