"""What turns a fake cloud's instances into machines: each runs its start-up script as processes here.

A machine's folder stands for its disk, two stubs for the runtime's Python and for `shutdown`. The processes
carry the run's tags, so that a test counts what really lives, and ends what is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlboost_runtime.processes import kill_tagged, tagged, tags

AGENT = """#!{python}
import signal, subprocess, sys, time
if sys.argv[2] == "rlboost_runtime.trainer.node":
    with open("node-starts", "a+") as starts:
        starts.write(" ".join(sys.argv[3:]) + "\\n"); starts.seek(0)
        if len(starts.readlines()) == 1:
            sys.exit(1)  # the first breaks
    time.sleep(600)
nap = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)  # as an engine is
def leave(*_):
    child.kill(); child.wait(); sys.exit(0)
signal.signal(signal.SIGTERM, leave)
assert sys.argv[1:3] == ["-m", "rlboost_runtime.agent"], sys.argv
bootstrap = open(sys.argv[3]).read()
assert sys.argv[4].rpartition("/")[0] in bootstrap
if "abandoned" in bootstrap:
    time.sleep(0.3); leave()
time.sleep(600)
"""


class Hypervisor:
    """Boots and stops machines. `stopped` is called once with the name of one that shut itself down."""

    def __init__(self, folder: Path, stopped: Callable[[str], None]) -> None:
        self.folder = folder
        self._stopped = stopped
        self._booted: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        self._agent = folder / "bin" / "python"
        self._agent.write_text(AGENT.format(python=sys.executable))
        self._agent.chmod(0o755)
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def root(self, machine: str) -> Path:
        return self.folder / "disks" / machine

    def boot(self, machine: str, script: str) -> None:
        """Run `script` as the first boot of `machine` does; once."""
        with self._lock:
            if machine in self._booted:
                return
            root = self.root(machine)
            root.mkdir(parents=True)
            (root / "user-data.sh").write_text(script)
            environment = {
                "PATH": os.environ["PATH"],
                "RLBOOST_ROOT": str(root),
                "RLBOOST_PYTHON": str(self._agent),
                "RLBOOST_POWER_OFF": f"touch {root}/off",
                **tags(self.folder, machine=machine),
            }
            with (root / "boot.log").open("wb") as log:
                self._booted[machine] = subprocess.Popen(
                    ["bash", str(root / "user-data.sh")],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def stop(self, machine: str) -> None:
        """Take its processes away at once."""
        with self._lock:
            child = self._booted.get(machine)
        if child is not None:
            kill_tagged(self.folder, machine=machine)
            child.wait()

    def num_agents(self, machine: str) -> int:
        """Living agents and their children, of every machine for ""."""
        living = tagged(self.folder, machine=machine or None)
        return sum(1 for process in living if "python" in " ".join(_command(process)))

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        kill_tagged(self.folder)
        for child in self._booted.values():
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        told: set[str] = set()
        while not self._over.wait(0.02):
            with self._lock:
                off = [
                    name for name in self._booted if name not in told and (self.root(name) / "off").exists()
                ]
            for name in off:
                told.add(name)
                self._stopped(name)


def _command(process: object) -> list[str]:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def wait_until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
