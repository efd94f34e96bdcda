"""SkyPilot's API server ends with its last user of ours, and leaves no executor behind; real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlboost_providers.skypilot import api_server
from rlboost_providers.skypilot.api_server import ServerUse
from rlboost_providers.skypilot.session import SkyPilotProcess

_NAP = "import time; time.sleep(120)"
SERVER = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', {_NAP!r}]) for _ in 'ab']; {_NAP}"
FAKE_SKY = f"""
import os, subprocess, sys
__version__ = "0.0"
project = os.environ.get("SKYPILOT_PROJECT_CONFIG")
if project and not os.path.exists(project):
    raise FileNotFoundError(project)
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
    deadline = time.monotonic() + 30  # two Pythons start, on whatever machine this is
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


@pytest.fixture
def watcher(tmp_path, server, monkeypatch) -> Iterator[threading.Thread]:
    monkeypatch.setattr(api_server, "LOOK_S", 0.02)
    monkeypatch.setattr(api_server, "BUSY_S", 0.02)
    idle = threading.Event()
    arguments = (tmp_path, server.pid, psutil.Process(server.pid).create_time(), idle.is_set)
    thread = threading.Thread(target=api_server.watch, args=arguments)
    thread.idle = idle  # type: ignore[attr-defined]
    yield thread
    server.kill()
    thread.join(10)


def test_the_server_ends_with_its_executors_when_its_last_user_has_gone(tmp_path, server, watcher) -> None:
    first, second = ServerUse(tmp_path), ServerUse(tmp_path)
    first.join(1)
    second.join(1)
    watcher.idle.set()
    watcher.start()
    first.temporary.joinpath("sky-tmp").mkdir()
    first.close()
    time.sleep(0.3)
    assert len(members(server.pid)) == 3, "somebody uses it"
    assert second.temporary.joinpath("sky-tmp").exists()
    second.close()
    until(lambda: members(server.pid) == [])
    until(lambda: not second.temporary.exists())


def test_a_server_that_has_clusters_goes_on_until_they_are_gone(tmp_path, server, watcher) -> None:
    watcher.start()
    time.sleep(0.3)
    assert len(members(server.pid)) == 3
    use = ServerUse(tmp_path)
    use.join(1)  # it can still be used
    use.close()
    watcher.idle.set()
    until(lambda: members(server.pid) == [])


def test_what_a_killed_server_leaves_is_ended(tmp_path, server, watcher) -> None:
    use = ServerUse(tmp_path)
    use.join(1)
    watcher.start()
    server.kill()
    server.wait(10)
    until(lambda: members(server.pid) == [])
    use.close()


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
    project = tmp_path / "some-run.yaml"
    project.touch()
    environment = {"SKYPILOT_PROJECT_CONFIG": str(project)}
    process = SkyPilotProcess(Path(sys.executable), tmp_path / "child", environment)
    try:
        assert process.ask("start", 30) == "0.0"
        (child,) = [p for p in psutil.Process().children() if str(process.log.parent) in str(p.open_files())]
        assert child.environ()["RLBOOST_RUN"], "the child is of the run, and ends with it"
        until(lambda: len(child.children(recursive=True)) == 4)  # the server, its two, its watcher
        started = next(each for each in child.children() if "sky.server.server" in each.cmdline())
        watcher = next(each for each in child.children() if each != started)
        for each in (started, watcher):
            assert not [name for name in each.environ() if name.startswith(("RLBOOST_", "SKYPILOT_PROJECT"))]
            assert each.environ()["TMPDIR"] == str(tmp_path / ".sky/.rlboost-temporary")
        project.unlink()  # with the run's folder
        child.kill()  # as a run that is ended by force
    finally:
        process.close()
    until(lambda: members(started.pid) == [])
    until(lambda: not watcher.is_running() or watcher.status() == psutil.STATUS_ZOMBIE)
