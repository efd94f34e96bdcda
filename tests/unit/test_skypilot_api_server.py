"""SkyPilot's API server ends with its last user of ours, and leaves no executor behind; real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlboost_providers.skypilot.api_server import ServerUse
from rlboost_providers.skypilot.process import SkyPilotProcess

_NAP = "import time; time.sleep(120)"
SERVER = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', {_NAP!r}]) for _ in 'ab']; {_NAP}"
FAKE_SKY = f"""
import subprocess, sys
__version__ = "0.0"
servers = []
def api_start():
    if not servers:
        command = [sys.executable, "-c", {SERVER!r}, "sky.server.server"]
        servers.append(subprocess.Popen(command, start_new_session=True))
def api_info(): pass
def api_status(): return []
def status(all_users): return []
def get(found): return found
"""
FAKE_STATUS = """
import enum
class RequestStatus(enum.Enum):
    RUNNING = "RUNNING"
    @classmethod
    def active_statuses(cls): return list(cls)
"""


def members(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], start_new_session=True)
    until(lambda: len(members(process.pid)) == 3)
    yield process
    for each in members(process.pid):
        each.kill()
    process.wait(10)


def test_the_last_user_ends_the_server_with_its_executors(tmp_path, server) -> None:
    first, second = ServerUse(tmp_path), ServerUse(tmp_path)
    first.join(1)
    first.started(server.pid)
    second.join(1)
    assert not first.leave(lambda: True), "somebody uses it"
    assert server.poll() is None
    assert second.leave(lambda: True)
    until(lambda: members(server.pid) == [])


def test_a_server_that_is_of_use_or_not_ours_goes_on(tmp_path, server) -> None:
    use = ServerUse(tmp_path)
    use.join(1)
    assert not use.leave(lambda: True), "nobody of us started it"
    use = ServerUse(tmp_path)
    use.join(1)
    use.started(server.pid)
    assert not use.leave(lambda: False), "it has clusters"
    assert len(members(server.pid)) == 3


def test_what_a_killed_server_left_is_ended_by_the_next_user(tmp_path, server) -> None:
    use = ServerUse(tmp_path)
    use.join(1)
    use.started(server.pid)
    server.kill()
    server.wait(10)
    assert len(members(server.pid)) == 2, "its executors live on"
    use.leave(lambda: True)
    ServerUse(tmp_path).join(1)
    until(lambda: members(server.pid) == [])


def test_the_server_is_not_of_the_run_that_starts_it_and_ends_with_the_child(tmp_path, monkeypatch) -> None:
    sky = tmp_path / "lib" / "sky"
    (sky / "server" / "requests").mkdir(parents=True)
    sky.joinpath("__init__.py").write_text(FAKE_SKY)
    sky.joinpath("server/__init__.py").write_text("")
    sky.joinpath("server/common.py").write_text("def is_api_server_local(): return True")
    sky.joinpath("server/requests/__init__.py").write_text("")
    sky.joinpath("server/requests/requests.py").write_text(FAKE_STATUS)
    monkeypatch.setenv("PYTHONPATH", str(sky.parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RLBOOST_RUN", str(tmp_path / "some-run"))
    process = SkyPilotProcess(Path(sys.executable), tmp_path / "child", {})
    try:
        assert process.ask("start", 30) == "0.0"
        (child,) = [p for p in psutil.Process().children() if str(process.log.parent) in str(p.open_files())]
        assert child.environ()["RLBOOST_RUN"], "the child is of the run, and ends with it"
        until(lambda: len(child.children(recursive=True)) == 3)
        started = child.children()[0]
        assert not [name for name in started.environ() if name.startswith("RLBOOST_")]
    finally:
        process.close()
    until(lambda: members(started.pid) == [])
