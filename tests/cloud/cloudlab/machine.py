"""Machines of the lab: network, mount and process namespaces with a copy-on-write root and a real sshd.

Guarantees: what a machine writes never reaches the host's disk; `destroy` leaves no process, link, mount or
folder of it; machines end with the process that started them, however that ends; `sweep` removes what a
killed lab has left. The host's tree, home and temporary files are not visible inside. Not a security
boundary: the kernel and the read-only system folders are shared.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

BRIDGE = "rlblab0"
GATEWAY = "10.231.255.254"
"""The host, as machines see it."""
PREFIX = "rlblab-"
"""Names of the lab's namespaces begin so."""
USER_ID = 5000
BOOT_S = 20.0
FAREWELL_S = 2.0
"""Longest wait for the peers of a machine without processes: some of them may be gone themselves."""
_UNHEARD = ("01", "04", "08", "09", "0B")
"""States in /proc/net/tcp of connections whose peer has not acknowledged their end: established, FIN_WAIT1,
CLOSE_WAIT, LAST_ACK, CLOSING."""
_INIT = Path(__file__).with_name("machine_init.sh")


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a short system command. Raises `RuntimeError` with its words, where `check` is set."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}; the lab needs to be root on Linux")
    return done


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other lab is there, and keep others away: there is one bridge."""
    with open("/tmp/.rlboost-cloudlab.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def raise_bridge() -> None:
    """Make the bridge that all machines hang on."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "addr", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")


def lower_bridge() -> None:
    """Remove it."""
    run("ip", "link", "del", BRIDGE, check=False)


def sweep(folder: Path) -> None:
    """Remove every machine and the bridge of a former lab, whose machines lay in `folder`."""
    for line in run("ip", "netns", "list", check=False).stdout.splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX):
            for pid in run("ip", "netns", "pids", name, check=False).stdout.split():
                _kill(int(pid))
            run("ip", "netns", "del", name, check=False)
    lower_bridge()
    shutil.rmtree(folder, ignore_errors=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait_for_end(pid: int | None) -> None:
    """Wait until a process that need not be our child is gone: only then are its connections closed."""
    if pid is None:
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 10)[0], f"process {pid} outlives its SIGKILL"
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Image:
    """What a machine boots from."""

    home: Path
    """Becomes /home, copy-on-write."""
    wheels: Path
    """Becomes /var/wheels: packages of the region's mirror, read-only."""
    cache: Path | None = None
    """Lies over `home`: what an installation of our runtime left there."""
    has_python: bool = True
    """Whether the system has a Python."""
    has_registry: bool = True
    """Whether uv is there and the region's mirror is reached; else there is no way to any package."""
    opt: Path | None = None
    """Becomes /opt, copy-on-write: that of the machine that the image was made of."""

    @property
    def bare(self) -> Image:
        """The same without a Python of the system's, and without a cache."""
        return replace(self, cache=None, has_python=False)

    @property
    def layers(self) -> str:
        """What /home consists of, for overlayfs."""
        return str(self.home) if self.cache is None else f"{self.cache}:{self.home}"


class Machine:
    """One machine. One thread at a time."""

    def __init__(
        self, name: str, address: str, user: str, public_keys: str, image: Image, folder: Path, script: str
    ) -> None:
        """`script` is run as root once it is up, as cloud-init does; "": nothing is."""
        self.name, self.address, self.user = name, address, user
        self._keys, self._image, self._script = public_keys, image, script
        self._namespace = PREFIX + name
        self._link = f"rlbv{name[-10:]}"
        self._folder = folder / name
        self._process: subprocess.Popen[bytes] | None = None
        self._is_plugged_in = True

    def boot(self) -> None:
        """Start it and wait until its sshd answers. Raises `RuntimeError` with the console's last lines."""
        self._folder.mkdir(parents=True)
        self._plug_in()
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "AUTHORIZED_KEYS": self._keys, "USER_DATA": self._script},
                start_new_session=True,
            )
        deadline = time.monotonic() + BOOT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not boot:\n{self.console.read_text()[-2000:]}")
            time.sleep(0.02)

    @property
    def console(self) -> Path:
        """Log of its first process."""
        return self._folder.with_suffix(".console.log")

    @property
    def is_off(self) -> bool:
        """Whether its first process has ended: it was shut down from inside."""
        return self._process is not None and self._process.poll() is not None

    def unplug(self) -> None:
        """Take the network away: peers hear nothing more, its processes live on."""
        run("ip", "link", "set", self._link, "down", check=False)
        self._is_plugged_in = False

    def cut_power(self) -> None:
        """SIGKILL every process and wait until all are gone. Where it is still plugged in, its peers have
        been told so when this returns: the network goes away soon after."""
        if self._process is not None and self._process.poll() is None:
            first = self._first_process()
            _kill(self._process.pid)
            self._process.wait(timeout=10)
            _wait_for_end(first)
            self._wait_for_farewells()

    def destroy(self) -> None:
        """Leave nothing of it but its console's log."""
        self.cut_power()
        run("ip", "netns", "del", self._namespace, check=False)
        run("ip", "link", "del", self._link, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def shell(self, script: str) -> str:
        """Run a script as root inside, as somebody at its console would; return what it printed."""
        inside = self.command("bash", "-c", script)
        done = subprocess.run(inside, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def command(self, *words: str) -> list[str]:
        """Return what runs a command as root inside."""
        return ["nsenter", "-t", str(self._first_process()), "-a", "--root", "--wd", *words]

    def _first_process(self) -> int | None:
        """The pid, outside, of the machine's init: its end is the end of every process of the machine."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _wait_for_farewells(self) -> None:
        """Wait until what its kernel had to say about closed connections has been said and acknowledged."""
        deadline = time.monotonic() + FAREWELL_S
        while self._is_plugged_in and self._is_speaking() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _is_speaking(self) -> bool:
        told = run("ip", "netns", "exec", self._namespace, "cat", "/proc/self/net/tcp", check=False).stdout
        return any(row.split()[3] in _UNHEARD for row in told.splitlines()[1:])

    def _plug_in(self) -> None:
        namespace, link = self._namespace, self._link
        run("ip", "netns", "add", namespace)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        run("ip", "link", "set", link, "master", BRIDGE, "up")
        inside = ("ip", "-n", namespace)
        run(*inside, "addr", "add", f"{self.address}/8", "dev", "eth0")  # all machines are on one link
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "route", "add", "default", "via", GATEWAY, "dev", "eth0", "onlink")
        run("ip", "route", "replace", f"{self.address}/32", "dev", BRIDGE)  # it may be in any network

    def _command(self) -> list[str]:
        return [
            *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._namespace),
            *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
            *("bash", str(_INIT), str(self._folder), self.name, self.user, str(USER_ID)),
            *(self._image.layers, str(self._image.wheels), "yes" if self._image.has_python else "no"),
            *("yes" if self._image.has_registry else "no", str(self._image.opt or "")),
        ]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False
