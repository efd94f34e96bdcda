"""A lab for the session, and a user of SkyPilot with an account in it. Needs root; one lab at a time.

What takes minutes to make (the machines' image, SkyPilot's venv) is kept in `$RLBOOST_CLOUDLAB_CACHE`, by
default `~/.cache/rlboost-cloudlab`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from bought_heads import BUCKET, KEYS, relay
from cloudlab import catalogue
from cloudlab.client import Lab
from cloudlab.image import cache_folder
from cloudlab.machine import GATEWAY
from cloudlab.prepare import LOCK

from rlboost_providers.skypilot.api_server import end_session
from rlboost_providers.skypilot.session import VARIABLE, skypilot_python
from rlboost_runtime.processes import kill_tagged
from tests.e2e.conftest import Cli

CACHE = cache_folder()
"""Of whoever runs the tests, before they take another home."""
NEEDED = ("ip", "unshare", "setpriv", "nsenter", "sshd", "ssh", "rsync", "sudo", "nc")


def pytest_sessionstart() -> None:
    """Clean up when we are told to end, as on Ctrl-C: `make ci` tells us where another test has failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cloud)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.fail(f"the lab needs root on Linux and {', '.join(missing) or 'nothing more'}: make cloudlab")
    lab = Lab(tmp_path_factory.mktemp("lab"), CACHE, LOCK)
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="session")
def account(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user who has an account in the lab; applied to this process too."""
    home = tmp_path_factory.mktemp("home-of-user")
    catalogue.write_home(home)
    environment = {
        "HOME": str(home),
        "RLBOOST_HOME": str(home / ".rlboost"),
        "AWS_ENDPOINT_URL": lab.url,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        yield environment


@pytest.fixture(scope="session")
def sky_user(account: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same for a user of SkyPilot, of which nothing is left at the end."""
    home = Path(account["HOME"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLBOOST_HOME", str(CACHE))
        python = str(skypilot_python())
    environment = {VARIABLE: python, "SKYPILOT_API_SERVER_LOCAL_PORT": str(_free_port())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        environment |= account
        try:
            yield environment
        finally:
            _end_processes_of(home)


@pytest.fixture
def cloud_cli(account: dict[str, str], tmp_path: Path) -> Iterator[Cli]:
    """`rlboost` as that user types it, with a home of its own for runs."""
    home = tmp_path / "home"
    home.mkdir()
    tool = Cli(home)
    tool.environment |= {**account, "RLBOOST_HOME": str(home)}
    yield tool
    for folder in (home / "runs").glob("*"):
        kill_tagged(folder)


@pytest.fixture
def api(lab: Lab) -> Iterator[str]:
    """The cloud's API as machines of the lab reach it."""
    _, _, port = lab.url.rpartition(":")
    with relay(GATEWAY, int(port)) as own_port:
        yield f"http://{GATEWAY}:{own_port}"


@pytest.fixture
def laptop(lab: Lab, cloud_cli: Cli) -> Cli:
    """The command line of a user with keys in the environment, and a bucket."""
    cloud_cli.environment |= KEYS
    cloud_cli.environment.pop("SSH_AUTH_SOCK", None)
    lab.ask("refuse", regions=[])
    s3: Any = boto3.client("s3", region_name="us-east-1", endpoint_url=lab.url)
    s3.create_bucket(Bucket=BUCKET)
    return cloud_cli


def skypilot_sessions(home: Path) -> set[int]:
    """Return the sessions of SkyPilot's API servers of a user: theirs and their executors', whose environment
    is hidden behind a title."""
    return {process.pid for process in psutil.process_iter() if _is_server_of(process, home)}


def members_of(sessions: set[int]) -> list[psutil.Process]:
    """Return what lives of `sessions`."""
    return [process for process in psutil.process_iter() if _session(process) in sessions]


def _end_processes_of(home: Path) -> None:
    """End the user's API servers with all their processes, and whatever else has the user's home."""
    for server in skypilot_sessions(home):
        with contextlib.suppress(psutil.NoSuchProcess):
            end_session(server, psutil.Process(server).create_time())
    left = [process for process in psutil.process_iter() if _home(process) == str(home)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)


def _is_server_of(process: psutil.Process, home: Path) -> bool:
    try:
        return _home(process) == str(home) and "sky.server.server" in process.cmdline()
    except psutil.Error:
        return False


def _session(process: psutil.Process) -> int:
    try:
        return -1 if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (ProcessLookupError, psutil.Error):
        return -1


def _home(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("HOME") if process.pid != os.getpid() else None
    except psutil.Error:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
