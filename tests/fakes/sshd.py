"""OpenSSH's own server on loopback, as a host of the user's: keys, known hosts and config of its own.

Needs sshd (Debian: openssh-server); a test that finds none fails and says so.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/sbin")

WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""A server does not outlive a test run that is killed."""


@dataclass(frozen=True)
class Sshd:
    """One server; `home` is its clients' home folder."""

    port: int
    folder: Path
    home: Path
    process: subprocess.Popen[bytes]

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def known_host(self) -> str:
        key = (self.folder / "host_key.pub").read_text().split()
        return f"[127.0.0.1]:{self.port} {key[0]} {key[1]}\n"

    def trust(self) -> None:
        with (self.home / ".ssh" / "known_hosts").open("a") as file:
            file.write(self.known_host)

    def stop(self) -> None:
        """Take the server away with all its connections, as a machine that is switched off."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=False):
                with suppress(psutil.NoSuchProcess):  # a connection that ends by itself meanwhile
                    if "sshd" in child.name():
                        child.kill()
            self.process.kill()
            self.process.wait()


def make_home(folder: Path) -> Path:
    """Return a home folder with a key of its own and an empty list of known hosts."""
    (folder / ".ssh").mkdir(mode=0o700, parents=True)
    (folder / ".ssh" / "known_hosts").touch()
    make_key(folder / ".ssh" / "id_ed25519")
    return folder


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


@contextmanager
def sshd_on(folder: Path, home: Path, *, trusted: bool = True) -> Iterator[Sshd]:
    """Serve SSH until the end; whoever has the home's key may come in."""
    assert SSHD is not None, "sshd is needed: apt-get install openssh-server"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(parents=True)
    make_key(folder / "host_key")
    shutil.copy(home / ".ssh" / "id_ed25519.pub", folder / "authorized_keys")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    with _serving(folder, home, port, trusted=trusted) as made:
        yield made


@contextmanager
def switched_on_again(server: Sshd) -> Iterator[Sshd]:
    """Serve what was stopped: the same machine, its key and its port."""
    with _serving(server.folder, server.home, server.port, trusted=False) as made:
        yield made


@contextmanager
def _serving(folder: Path, home: Path, port: int, *, trusted: bool) -> Iterator[Sshd]:
    assert SSHD is not None
    with (folder / "sshd.log").open("ab") as log:
        process = subprocess.Popen(
            [*WITH_US, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
    made = Sshd(port, folder, home, process)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "sshd.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        if trusted:
            made.trust()
        yield made
    finally:
        made.stop()
