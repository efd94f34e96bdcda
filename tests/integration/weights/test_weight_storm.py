"""Pulls in a storm: connections are cut, hang and crawl, holders die and come back, one of them lies,
receivers crash half-way. Whatever happens, a version is either not there or every byte of it is right, and
every pull ends.

`RLBOOST_STORM_PULLS` sets how many there are (a few in `make test`, 1,000 in `make soak`); a failure names
its seed. As root the same is done from a network namespace behind NAT that accepts nothing inbound.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import random
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost_runtime.errors import RLBoostError
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.child_pipe import PullProgress, PullRequest, PullSource, SourceKind
from rlboost_runtime.weights.manifest import Probe
from rlboost_runtime.weights.pull import chunk_scheduler as work
from rlboost_runtime.weights.pull.pull import Deadlines, pull
from rlboost_runtime.weights.serve.catalog import Catalog, Entry, PulledCatalog, StoreCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer
from rlboost_runtime.weights.store import part_folder
from rlboost_runtime.weights.store.store import LEASE, WeightStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

PULLS = int(os.environ.get("RLBOOST_STORM_PULLS", "24"))
SEED = int(os.environ.get("RLBOOST_STORM_SEED", "0"))
CHUNK = 16 * 1024
VERSIONS = 4
LONGEST_PULL_S = 60.0
DEADLINES = Deadlines(idle_s=0.6, progress_s=12.0)
PROBE = Probe((1,), (2,), (-0.5,), 0.1)


class Crashed(BaseException):
    """The receiver ends here."""


class Proxy:
    """Forwards a port, badly. Each connection draws its own fate from a seeded generator."""

    def __init__(self, target: int, host: str, seed: int) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(0.05)
        self.port = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self.dead = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._workers: list[threading.Thread] = []
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for worker in self._workers:
            worker.join(5)
        self._listener.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            draw = self._rng.random()
            limit = self._rng.randrange(2_000, 600_000) if draw < 0.3 else None
            worker = threading.Thread(target=self._forward, args=(client, draw, limit))
            worker.start()
            self._workers = [each for each in self._workers if each.is_alive()] + [worker]

    def _forward(self, client: socket.socket, draw: float, limit: int | None) -> None:
        """Below 0.15 the connection is cut after `limit` bytes, below 0.2 it hangs there, below 0.3 it
        crawls from there on."""
        with client, contextlib.suppress(OSError):
            if self.dead.is_set():
                return
            with socket.create_connection(("127.0.0.1", self._target)) as server:
                up = threading.Thread(target=self._pump, args=(client, server))
                up.start()
                self._down(server, client, draw, limit)
                for each in (client, server):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                up.join(5)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(0.2)
        while not self._stop.is_set():
            try:
                data = source.recv(65536)
                if not data:
                    return
                sink.sendall(data)
            except TimeoutError:
                continue
            except OSError:
                return

    def _down(self, source: socket.socket, sink: socket.socket, draw: float, limit: int | None) -> None:
        source.settimeout(0.2)
        sink.settimeout(1.0)
        sent = 0
        while not self._stop.is_set() and not self.dead.is_set():
            try:
                data = source.recv(16384)
            except TimeoutError:
                continue
            if not data:
                return
            if limit is not None and sent + len(data) > limit:
                if draw < 0.15:
                    sink.sendall(data[: limit - sent])
                    return
                if draw < 0.2:
                    self._stop.wait(2.0)
                    return
                self._stop.wait(0.3)
            sink.sendall(data)
            sent += len(data)


class Liar(PulledCatalog):
    """Has everything, and a wrong byte in every second chunk."""

    def __init__(self, wrong: Path) -> None:
        super().__init__([wrong])

    @contextmanager
    def reading(self, version: int) -> Iterator[Entry]:
        with super().reading(version) as entry:
            yield dataclasses.replace(entry, is_part=False)


class Storm:
    """A store with a few versions, its holders, and machines that pull from them."""

    def __init__(self, path: Path, stack: ExitStack, host: str, seed: int) -> None:
        self.path = path
        self.host = host
        self.run = RunFolder(path / "run")
        security.create_secrets(self.run)
        self.token = security.read_token(self.run)
        self.store = WeightStore(self.run.weights, keep=VERSIONS, chunk_bytes=CHUNK, max_deltas=3)
        self.values = np.random.default_rng(seed).normal(0, 0.02, 150_000).astype(np.float16).view(np.int16)
        self.files = [self._publish(version) for version in range(VERSIONS)]
        self.proxies: list[Proxy] = []
        self._stack = stack
        self._seed = seed
        self.head = self._holder("head", SourceKind.HEAD, self.run, StoreCatalog(self.store, 0.2))
        self.peers = [self._peer("good", 1.0), self._peer("half", 0.5), self._liar()]

    def _publish(self, version: int) -> dict[str, bytes]:
        rng = np.random.default_rng(version)
        where = rng.random(self.values.size) < (0.02 if version else 0.0)
        self.values = self.values + where * rng.choice([-1, 1], self.values.size).astype(np.int16)
        self.store.publish(version, self._write, PROBE)
        folder = self.store.path(version)
        skipped = (LEASE, "manifest.json")
        return {
            path.name: path.read_bytes()
            for path in folder.iterdir()
            if path.name not in skipped and path.suffix != ".bin"
        }

    def _write(self, folder: Path) -> None:
        size = self.values.nbytes
        entry = {"w": {"dtype": "F16", "shape": [self.values.size], "data_offsets": [0, size]}}
        header = json.dumps(entry).encode()
        header += b" " * (-len(header) % 8)
        data = len(header).to_bytes(8, "little") + header + self.values.tobytes()
        (folder / "model.safetensors").write_bytes(data)
        (folder / "config.json").write_text("{}")

    def _peer(self, name: str, share: float) -> PullSource:
        """Return a peer that has all versions, or of each only a share of the chunks."""
        folder = self.path / name
        rng = random.Random(name)
        for version in range(VERSIONS):
            target = folder / f"v{version:06d}{'' if share == 1.0 else '.part'}"
            shutil.copytree(self.store.path(version), target, ignore=shutil.ignore_patterns(LEASE))
            if share < 1.0:
                with self.store.read(version) as lease, StoreCatalog(self.store, 0).reading(version) as entry:
                    assert lease.folder == entry.folder
                    num = len(entry.marks())
                (target / ".verified").write_bytes(bytes(rng.random() < share for _ in range(num)))
        return self._holder(name, SourceKind.PEER, self._identity(name), PulledCatalog([folder]))

    def _liar(self) -> PullSource:
        folder = self.path / "liar"
        for version in range(VERSIONS):
            target = folder / f"v{version:06d}"
            shutil.copytree(self.store.path(version), target, ignore=shutil.ignore_patterns(LEASE))
            for path in target.iterdir():
                data = bytearray(path.read_bytes())
                for at in range(5, len(data), 2 * CHUNK):
                    data[at] ^= 4
                if path.name != "manifest.json":
                    path.write_bytes(data)
        return self._holder("liar", SourceKind.PEER, self._identity("liar"), Liar(folder))

    def _identity(self, name: str) -> RunFolder:
        identity = RunFolder(self.path / "identities" / name)
        security.create_secrets(identity)
        return identity

    def _holder(self, name: str, kind: SourceKind, identity: RunFolder, catalog: Catalog) -> PullSource:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = WeightHttpServer(listener, security.server_context(identity), self.token, catalog)
        stop = threading.Event()
        thread = threading.Thread(target=server.serve_until, args=(stop,))
        thread.start()
        self._stack.callback(thread.join, 10)
        self._stack.callback(stop.set)
        proxy = Proxy(port, self.host, self._seed + len(self.proxies))
        self._stack.callback(proxy.close)
        self.proxies.append(proxy)
        url, certificate = f"https://{self.host}:{proxy.port}", identity.certificate.read_text()
        return PullSource(name, kind, url, certificate, token=self.token)

    def kill_and_revive(self, rng: random.Random, stop: threading.Event) -> None:
        """Take holders away for a moment, one after the other."""
        while not stop.wait(rng.uniform(0.05, 0.4)):
            proxy = rng.choice(self.proxies)
            proxy.dead.set()
            stop.wait(rng.uniform(0.05, 0.4))
            proxy.dead.clear()

    def request(self, rng: random.Random, machine: str) -> PullRequest:
        peers = rng.sample(self.peers, rng.randrange(len(self.peers) + 1))
        return PullRequest(
            self.head.url,
            rng.randrange(VERSIONS),
            str(self.path / "machines" / machine),
            self.token,
            self.run.certificate.read_text(),
            streams=rng.randrange(1, 5),
            extra_sources=tuple(peers),
            part=(0, 0) if rng.random() < 0.3 else (rng.randrange(3), 3),
            receiver=machine,
        )

    def check(self, folder: Path) -> int:
        """Fail where a complete version has a wrong byte; return how many complete ones there are."""
        found = [path for path in folder.glob("v*") if path.suffix == ""] if folder.is_dir() else []
        for path in found:
            for name, data in self.files[int(path.name[1:])].items():
                assert (path / name).read_bytes() == data, f"{path / name} is wrong"
        return len(found)


class CrashingPart(part_folder.PartFolder):
    """Ends the receiver after so many chunks."""

    left: int | None = None

    def write(self, piece: Any, data: memoryview) -> None:
        cls = type(self)
        if cls.left is not None:
            cls.left -= 1
            if cls.left <= 0:
                raise Crashed
        super().write(piece, data)


def run_storm(storm: Storm, seed: int, num: int) -> dict[str, int]:
    """Pull `num` times; return how the pulls ended."""
    ends = {"done": 0, "crashed": 0, "gave_up": 0, "corrupt_chunks": 0, "by_delta": 0}
    for i in range(num):
        rng = random.Random(f"{seed}/{i}")
        machine = f"m{rng.randrange(6)}"
        request = storm.request(rng, machine)
        CrashingPart.left = rng.randrange(1, 15) if rng.random() < 0.25 else None
        began = time.monotonic()
        try:
            pulled = pull(request, PullProgress(), DEADLINES)
        except Crashed:
            ends["crashed"] += 1
        except RLBoostError as exc:
            ends["crashed" if "Crashed" in exc.problem else "gave_up"] += 1
        else:
            ends["done"] += 1
            ends["corrupt_chunks"] += pulled.num_corrupt
            ends["by_delta"] += pulled.how == "delta"
            assert pulled.path.name == f"v{request.version:06d}"
            assert storm.check(Path(request.folder)) > 0
        assert time.monotonic() - began < LONGEST_PULL_S, f"pull {i} of seed {seed} took too long"
        storm.check(Path(request.folder))
        if rng.random() < 0.1:
            shutil.rmtree(request.folder, ignore_errors=True)
    return ends


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_folder, "PartFolder", CrashingPart)
    monkeypatch.setattr(work, "PATIENCE_S", 0.3)
    monkeypatch.setattr(work, "REPEAT_AFTER_S", 0.3)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def weather(path: Path, host: str, within: Callable[[Callable[[], None]], None], num: int) -> dict[str, int]:
    """Do a storm whose pulls run `within` something; return how they ended."""
    found: list[dict[str, int]] = []
    with ExitStack() as stack:
        storm = Storm(path, stack, host, SEED)
        stop = threading.Event()
        chaos = threading.Thread(target=storm.kill_and_revive, args=(random.Random(SEED), stop))
        chaos.start()
        stack.callback(chaos.join)
        stack.callback(stop.set)
        within(lambda: found.append(run_storm(storm, SEED, num)))
    (ends,) = found
    print(f"{num} pulls, seed {SEED}: {ends}")
    assert ends["done"] > 0.5 * num
    assert ends["gave_up"] < max(2, 0.05 * num)
    assert ends["corrupt_chunks"] > 0
    return ends


@pytest.mark.usefixtures("crashing")
def test_pulls_in_a_storm_are_right_or_not_there(tmp_path: Path) -> None:
    ends = weather(tmp_path, "127.0.0.1", lambda pulls: pulls(), PULLS)
    assert ends["crashed"] > 0
    assert ends["by_delta"] > 0


# --- behind NAT ------------------------------------------------------------------------------------------

INSIDE, OUTSIDE = "rlb-nat", "10.213.7.1"


@contextmanager
def nat_namespace() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Make a namespace that reaches us through NAT and accepts nothing inbound; yield what runs there."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("iptables") is None:
        pytest.skip("network namespaces and NAT take root, ip and iptables")
    router = f"{INSIDE}-router"
    commands = [
        f"ip netns add {INSIDE}",
        f"ip netns add {router}",
        f"ip link add rlb-out type veth peer name wan netns {router}",
        f"ip addr add {OUTSIDE}/24 dev rlb-out",
        "ip link set rlb-out up",
        f"ip -n {router} addr add 10.213.7.2/24 dev wan",
        f"ip -n {router} link set wan up",
        f"ip -n {router} link add lan type veth peer name eth0 netns {INSIDE}",
        f"ip -n {router} addr add 192.168.77.1/24 dev lan",
        f"ip -n {router} link set lan up",
        f"ip -n {INSIDE} addr add 192.168.77.2/24 dev eth0",
        f"ip -n {INSIDE} link set eth0 up",
        f"ip -n {INSIDE} link set lo up",
        f"ip -n {INSIDE} route add default via 192.168.77.1",
        f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1",
        f"ip netns exec {router} iptables -t nat -A POSTROUTING -o wan -j MASQUERADE",
        f"ip netns exec {router} iptables -P FORWARD DROP",
        f"ip netns exec {router} iptables -A FORWARD -i lan -j ACCEPT",
        f"ip netns exec {router} iptables -A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no NAT to be had here: {command}: {done.stderr.strip()}")
        yield _in_namespace
    finally:
        for command in (f"ip netns del {INSIDE}", f"ip netns del {router}", "ip link del rlb-out"):
            subprocess.run(command.split(), capture_output=True)


def _in_namespace(pulls: Callable[[], None]) -> None:
    """Run in a thread that lives in the namespace; threads that it starts live there too."""
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with open(f"/run/netns/{INSIDE}") as file:
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.setns(file.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", 9), 0.2):
                pass
            pulls()
        except BaseException as exc:
            failures.append(exc)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.mark.usefixtures("crashing")
def test_the_same_from_behind_nat(tmp_path: Path) -> None:
    with nat_namespace() as within:
        weather(tmp_path, OUTSIDE, within, max(12, PULLS // 2))
