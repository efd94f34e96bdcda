"""Pulls over real TLS, from the real server and from one that misbehaves on purpose."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.weights.child_pipe import PullProgress, PullReport, PullRequest
from rlboost_runtime.weights.manifest import Manifest, Probe
from rlboost_runtime.weights.pull import pull as pull_module
from rlboost_runtime.weights.pull.pull import Deadlines, pull
from rlboost_runtime.weights.store.part_folder import part_folder
from rlboost_runtime.weights.store.store import LEASE, WeightStore

pytestmark = pytest.mark.integration

PROBE = Probe((1,), (2,), (-0.5,), 0.1)
CHUNK = 64 * 1024
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def publish(run: RunFolder, version: int, num_bytes: int, seed: int = 0, keep: int = 2) -> Manifest:
    def write(folder: Path) -> None:
        header = {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
        text = json.dumps(header).encode()
        body = random.Random(seed).randbytes(num_bytes)
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("")

    return WeightStore(run.weights, keep=keep, chunk_bytes=CHUNK).publish(version, write, PROBE)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    security.create_secrets(run)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "machine" / "weights"


# --- a server that misbehaves ----------------------------------------------------------------------------


@dataclass
class Faults:
    """What goes wrong; counts what was sent."""

    run: RunFolder
    pause_s: float = 0.0
    """After each piece of 64 KiB."""
    corrupt_requests: int = 0
    """So many of the next range requests get one byte wrong."""
    cut_requests: int = 0
    """So many of the next range requests end in the middle."""
    busy_requests: int = 0
    """So many of the next requests get 503."""
    hang_requests: int = 0
    """So many of the next range requests stop in the middle, the connection open."""
    drip_s: float | None = None
    """One byte per this many seconds."""
    ignore_ranges: bool = False
    sent: int = 0
    requests: list[str] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    """Of the clients."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, name: str) -> bool:
        with self.lock:
            left = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            return bool(left)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        faults = self.faults
        faults.requests.append(self.path)
        faults.ports.add(self.client_address[1])
        version, name = self.path.split("/")[-2:]
        path = faults.run.weights / f"v{int(version):06d}" / name
        if not security.authorised(self.headers.get("Authorization"), security.read_token(faults.run)):
            return self.answer(401)
        if not path.exists():
            return self.answer(404)
        if faults.take("busy_requests"):
            return self.answer(503)
        data = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted is None or faults.ignore_ranges:
            return self.answer(200, data)
        start, end = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
        return self.answer(206, data[start : end + 1], f"bytes {start}-{end}/{len(data)}")

    def answer(self, status: int, data: bytes = b"", content_range: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if status == 206:
            self.send_badly(bytearray(data))
        else:
            self.wfile.write(data)

    def send_badly(self, data: bytearray) -> None:
        faults = self.faults
        if faults.take("corrupt_requests"):
            data[len(data) // 2] ^= 1
        if faults.take("cut_requests"):
            data = data[: len(data) // 2]
            self.close_connection = True
        if faults.take("hang_requests"):
            self.wfile.write(data[: len(data) // 2])
            faults.over.wait(30)
            self.close_connection = True
            return
        step = CHUNK if faults.drip_s is None else 1
        for at in range(0, len(data), step):
            self.wfile.write(data[at : at + step])
            with faults.lock:
                faults.sent += len(data[at : at + step])
            if faults.over.wait(faults.drip_s or faults.pause_s):
                return


class BadServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients are killed on purpose."""


@contextmanager
def bad_server(run: RunFolder, faults: Faults) -> Iterator[str]:
    handler = type("FaultyHandler", (Handler,), {"faults": faults, "timeout": 10})
    server = BadServer(("127.0.0.1", 0), handler)
    server.socket = security.server_context(run).wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        faults.over.set()
        server.shutdown()
        thread.join(5)
        server.server_close()


# --- pulling ---------------------------------------------------------------------------------------------


def request(run: RunFolder, folder: Path, url: str, version: int = 1, **changes: Any) -> PullRequest:
    fields: dict[str, Any] = {
        "url": url,
        "version": version,
        "folder": str(folder),
        "token": security.read_token(run),
        "certificate": run.certificate.read_text(),
    }
    return PullRequest(**fields | changes)


def pull_now(run: RunFolder, folder: Path, url: str, deadlines: Deadlines, **changes: Any) -> PullReport:
    return pull(request(run, folder, url, **changes), PullProgress(), deadlines)


PATIENT = Deadlines(idle_s=5, progress_s=20)


@contextmanager
def puller(run: RunFolder, folder: Path, url: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    limit = options.pop("largest_file", None)

    def prepare() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    asked = request(run, folder, url, **options)
    line = json.dumps({name: getattr(asked, name) for name in asked.__struct_fields__}).encode() + b"\n"
    process = subprocess.Popen(
        [sys.executable, "-m", "rlboost_runtime.weights.pull.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENV,
        preexec_fn=prepare,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, list[dict[str, Any]]]:
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout]
    return process.wait(20), lines


def same_files(run: RunFolder, folder: Path, version: int = 1) -> bool:
    name = f"v{version:06d}"
    there = {path.name: path.read_bytes() for path in (run.weights / name).iterdir() if path.name != LEASE}
    return {path.name: path.read_bytes() for path in (folder / name).iterdir()} == there


@contextmanager
def real_server(run: RunFolder) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    started_before = run.weights_endpoint.exists()
    process = subprocess.Popen(
        [sys.executable, "-m", "rlboost_runtime.weights.serve.server", str(run.path)],
        env=ENV,
        stderr=subprocess.DEVNULL,
    )
    try:
        if not started_before:
            wait_until(run.weights_endpoint.exists)
        yield process, read_json(run.weights_endpoint)["url"]
    finally:
        process.kill()
        process.wait()


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- the real server -------------------------------------------------------------------------------------


def test_a_version_arrives_whole_and_once(run: RunFolder, folder: Path) -> None:
    manifest = publish(run, 1, 5_000_000)
    with real_server(run) as (_, url):
        with puller(run, folder, url) as process:
            code, lines = outcome(process)
        assert code == 0
        assert lines[-1]["type"] == "PullReport"
        assert lines[-1]["folder"] == str(folder / "v000001")
        assert lines[-1]["pulled_bytes"] == manifest.num_bytes
        assert lines[-1]["num_corrupt"] == 0
        assert lines[-1]["pull_s"] > 0
        assert same_files(run, folder)
        assert os.listdir(folder) == ["v000001"]
        with puller(run, folder, url) as process:
            code, lines = outcome(process)
        assert code == 0
        assert lines[-1]["pulled_bytes"] == 0
        assert os.listdir(folder) == ["v000001"]


def test_more_streams_than_cores_wait_until_cores_are_idle(
    run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server as slow as a long way: each stream idles, and the others join."""
    monkeypatch.setattr(pull_module, "_num_cores", lambda: 1)
    publish(run, 1, 6_000_000)
    faults = Faults(run, pause_s=0.1)
    began = time.monotonic()
    with bad_server(run, faults) as url, ThreadPoolExecutor(1) as pool:
        future = pool.submit(pull_now, run, folder, url, PATIENT, streams=4)
        wait_until(lambda: len(faults.ports) == 3)  # one was for the manifest
        wait_until(lambda: len(faults.ports) == 5)
        assert time.monotonic() - began > pull_module.SPARE_S
        assert future.result(PATIENT.progress_s).how == "full"
    assert same_files(run, folder)


def test_a_server_killed_and_restarted_in_the_middle_is_waited_for(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 60_000_000)
    marks = folder / "v000001.part" / ".verified"
    with real_server(run) as (server, url), puller(run, folder, url, streams=1) as process:
        wait_until(lambda: marks.exists() and 1 in marks.read_bytes())
        process.send_signal(signal.SIGSTOP)
        assert 0 in marks.read_bytes(), "the pull was over before it could be disturbed"
        server.kill()
        server.wait()
        process.send_signal(signal.SIGCONT)
        time.sleep(0.3)  # it finds nobody there
        with real_server(run) as (_, again):
            assert again == url
            code, lines = outcome(process)
    assert code == 0, lines
    assert same_files(run, folder)


def test_a_version_being_pulled_outlives_two_publications(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 60_000_000)
    marks = folder / "v000001.part" / ".verified"
    with real_server(run) as (_, url), puller(run, folder, url, streams=1) as process:
        wait_until(lambda: marks.exists() and 1 in marks.read_bytes())
        process.send_signal(signal.SIGSTOP)
        publish(run, 2, 1000)
        publish(run, 3, 1000)
        process.send_signal(signal.SIGCONT)
        code, lines = outcome(process)
        assert code == 0, lines
        assert same_files(run, folder)


def test_an_unknown_version_is_told_at_once(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1000)
    with real_server(run) as (_, url), puller(run, folder, url, version=7) as process:
        code, lines = outcome(process)
    assert code == 1
    assert "does not have version 7" in lines[-1]["problem"]


def test_a_wrong_token_is_told_at_once_and_never_shown(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1000)
    with real_server(run) as (_, url), puller(run, folder, url, token="guess") as process:
        code, lines = outcome(process)
    assert code == 1
    assert "refused our token" in lines[-1]["problem"]
    assert "guess" not in lines[-1]["problem"]


def test_a_file_cut_short_in_the_store_is_an_error(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    with real_server(run) as (_, url):
        os.truncate(run.weights / "v000001" / "model.safetensors", 700_000)
        with puller(run, folder, url) as process:
            code, lines = outcome(process)
    assert code == 1
    assert "came wrong 3 times" in lines[-1]["problem"]
    assert not (folder / "v000001").exists()


def test_a_byte_changed_in_the_store_is_an_error(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    with real_server(run) as (_, url):
        flip_a_byte(run)
        with puller(run, folder, url) as process:
            code, lines = outcome(process)
    assert code == 1
    assert "came wrong 3 times" in lines[-1]["problem"]
    assert not (folder / "v000001").exists()


def test_a_version_that_is_damaged_when_the_server_starts_is_not_served(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    flip_a_byte(run)
    with real_server(run) as (_, url), puller(run, folder, url) as process:
        code, lines = outcome(process)
    assert code == 1
    assert "does not have version 1" in lines[-1]["problem"]
    assert (run.weights / "v000001.damaged").is_dir()


def flip_a_byte(run: RunFolder) -> None:
    with (run.weights / "v000001" / "model.safetensors").open("r+b") as file:
        file.seek(500_000)
        byte = file.read(1)[0]
        file.seek(500_000)
        file.write(bytes([byte ^ 1]))


# --- faults on the wire ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_pull_resumes_with_what_it_had(run: RunFolder, folder: Path, seed: int) -> None:
    manifest = publish(run, 1, 4_000_000)
    kill_at = random.Random(seed).randrange(200_000, 3_600_000)
    faults = Faults(run, pause_s=0.005)
    with bad_server(run, faults) as url:
        with puller(run, folder, url, streams=2) as process:
            wait_until(lambda: faults.sent >= kill_at)
            process.kill()
            process.wait()
        assert not (folder / "v000001").exists()
        verified = (folder / "v000001.part" / ".verified").read_bytes().count(1)
        faults.pause_s = 0
        pulled = pull_now(run, folder, url, PATIENT)
    assert same_files(run, folder)
    assert pulled.pulled_bytes <= manifest.num_bytes - (verified - 3) * CHUNK  # three may be short
    assert pulled.pulled_bytes < manifest.num_bytes


def test_a_chunk_corrupted_on_the_wire_is_fetched_again(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    with bad_server(run, Faults(run, corrupt_requests=2)) as url:
        pulled = pull_now(run, folder, url, PATIENT)
    assert pulled.num_corrupt == 2
    assert same_files(run, folder)


def test_broken_connections_and_a_busy_server_are_tried_again(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    with bad_server(run, Faults(run, cut_requests=4, busy_requests=2)) as url:
        pull_now(run, folder, url, PATIENT)
    assert same_files(run, folder)


def test_a_connection_that_falls_silent_is_given_up_for_another(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    with bad_server(run, Faults(run, hang_requests=2)) as url:
        pull_now(run, folder, url, Deadlines(idle_s=0.3, progress_s=20))
    assert same_files(run, folder)


@pytest.mark.parametrize("fault", [{"hang_requests": 10**6}, {"drip_s": 0.05}])
def test_a_pull_without_progress_ends(run: RunFolder, folder: Path, fault: dict[str, Any]) -> None:
    publish(run, 1, 1_000_000)
    with bad_server(run, Faults(run, **fault)) as url:
        started = time.monotonic()
        with pytest.raises(RuntimeFault, match="no progress for 1 s"):
            pull_now(run, folder, url, Deadlines(idle_s=0.4, progress_s=1))
        assert time.monotonic() - started < 4


def test_nobody_there_ends_the_pull_too(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1000)
    with bad_server(run, Faults(run)) as url:
        pass
    with pytest.raises(RuntimeFault, match=r"no progress for 0\.5 s .*ConnectionRefused"):
        pull_now(run, folder, url, Deadlines(idle_s=1, progress_s=0.5))


def test_a_server_that_ignores_ranges_is_an_error(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000)
    with (
        bad_server(run, Faults(run, ignore_ranges=True)) as url,
        pytest.raises(RuntimeFault, match="came wrong"),
    ):
        pull_now(run, folder, url, PATIENT)


def test_a_version_deleted_in_the_middle_is_told(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 4_000_000)
    faults = Faults(run, pause_s=0.005)
    with bad_server(run, faults) as url, puller(run, folder, url, streams=2) as process:
        wait_until(lambda: faults.sent >= 500_000)
        shutil.rmtree(run.weights / "v000001")
        code, lines = outcome(process)
    assert code == 1
    assert "does not have version 1, or no longer" in lines[-1]["problem"]


def test_another_certificate_never_sees_the_token(run: RunFolder, folder: Path, tmp_path: Path) -> None:
    publish(run, 1, 1000)
    other = RunFolder(tmp_path / "other")
    security.create_secrets(other)
    faults = Faults(run)
    with bad_server(other, faults) as url, pytest.raises(ProtocolError, match="another certificate"):
        pull_now(run, folder, url, PATIENT)
    assert faults.requests == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "https://h:99999", ""])
def test_what_is_no_https_url_is_refused(run: RunFolder, folder: Path, url: str) -> None:
    with pytest.raises(ProtocolError, match="cannot pull from"):
        pull_now(run, folder, url, PATIENT)


# --- this machine ----------------------------------------------------------------------------------------


def test_a_full_disk_is_told_before_anything_is_fetched(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 2_000_000)
    faults = Faults(run)
    with bad_server(run, faults) as url, puller(run, folder, url, largest_file=1_000_000) as process:
        code, lines = outcome(process)
    assert code == 1
    assert "no space left" in lines[-1]["problem"]
    assert faults.sent == 0


def test_the_puller_ends_with_its_agent(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 4_000_000)
    faults = Faults(run, pause_s=0.05)
    with bad_server(run, faults) as url, puller(run, folder, url, streams=1) as process:
        wait_until(lambda: faults.sent > 0)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(5) == 1
        process.stdin = None


def test_progress_is_reported_while_it_lasts(run: RunFolder, folder: Path) -> None:
    manifest = publish(run, 1, 4_000_000)
    with bad_server(run, Faults(run, pause_s=0.01)) as url, puller(run, folder, url, streams=1) as process:
        started = time.monotonic()
        _, lines = outcome(process)
        lasted = time.monotonic() - started
    reports = lines[:-1]
    assert 1 <= len(reports) <= 5 * lasted + 1
    assert [report["done_bytes"] for report in reports] == sorted(report["done_bytes"] for report in reports)
    assert reports[-1]["total_bytes"] == manifest.num_bytes
    assert 0 < reports[-1]["done_bytes"] <= manifest.num_bytes


def test_a_request_that_cannot_be_read_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlboost_runtime.weights.pull.child"],
        input=b'{"url": 1}\n',
        capture_output=True,
        env=ENV,
        timeout=30,
    )
    assert done.returncode == 1
    assert "cannot be read" in json.loads(done.stdout)["problem"]


def test_a_version_damaged_on_this_machine_is_fetched_again(run: RunFolder, folder: Path) -> None:
    manifest = publish(run, 1, 1_000_000)
    with bad_server(run, Faults(run)) as url:
        pull_now(run, folder, url, PATIENT)
        with (folder / "v000001" / "model.safetensors").open("r+b") as file:
            file.write(b"\xff")
        assert pull_now(run, folder, url, PATIENT).pulled_bytes == manifest.num_bytes
    assert same_files(run, folder)


def test_reading_what_is_here_already_counts_as_progress(run: RunFolder, folder: Path) -> None:
    """A slow disk takes minutes for that, and whoever waits for us takes silence for a standstill."""
    manifest = publish(run, 1, 1_000_000)
    with bad_server(run, Faults(run)) as url:
        pull_now(run, folder, url, PATIENT)
        (folder / "v000001").rename(folder / "v000001.part")
        (folder / "v000001.part" / ".verified").write_bytes(
            b"\1" * sum(len(f.chunks) for f in manifest.files)
        )
        for _ in range(2):  # a part that is taken up, and a version that is here
            progress = PullProgress()
            pull(request(run, folder, url), progress, PATIENT)
            assert progress.moved_bytes == manifest.num_bytes


def test_a_part_of_other_content_is_not_mixed_in(run: RunFolder, folder: Path) -> None:
    publish(run, 1, 1_000_000, seed=1)
    faults = Faults(run, hang_requests=10**6)
    with bad_server(run, faults) as url, pytest.raises(RuntimeFault):
        pull_now(run, folder, url, Deadlines(idle_s=0.2, progress_s=0.4))
    assert (folder / "v000001.part").exists()
    shutil.rmtree(run.weights)
    publish(run, 1, 900_000, seed=2)
    with bad_server(run, Faults(run)) as url:
        pull_now(run, folder, url, PATIENT)
    assert same_files(run, folder)


def test_old_versions_and_abandoned_parts_are_deleted(run: RunFolder, folder: Path) -> None:
    for version in range(4):
        publish(run, version, 1000, keep=9)
    with bad_server(run, Faults(run)) as url:
        for version in (0, 1, 3):
            pull_now(run, folder, url, PATIENT, version=version)
            (folder / f"v00009{version}.part").mkdir()
        assert sorted(os.listdir(folder)) == ["v000001", "v000003", "v000093.part"]
        pull_now(run, folder, url, PATIENT, version=2)  # an older one is kept beside newer ones
        assert sorted(os.listdir(folder)) == ["v000001", "v000002", "v000003"]


def test_a_part_folder_that_is_renamed_while_it_is_looked_at_is_made_again(
    run: RunFolder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pull completed it between `mkdir` (it exists) and the look whether that is a folder (gone)."""
    manifest = publish(run, 1, 2_000)
    make, refused = os.mkdir, []

    def refuse_once(path: Path, *rest: Any) -> None:
        if not refused and str(path).endswith(".part"):
            refused.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make(path, *rest)

    monkeypatch.setattr(os, "mkdir", refuse_once)
    with part_folder(folder, manifest):
        assert refused


def test_two_pulls_of_one_version_do_not_disturb_each_other(run: RunFolder, folder: Path) -> None:
    manifest = publish(run, 1, 2_000_000)
    pulled: list[PullReport] = []
    with bad_server(run, Faults(run, pause_s=0.005)) as url:
        threads = [
            threading.Thread(target=lambda: pulled.append(pull_now(run, folder, url, PATIENT)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert sorted(p.pulled_bytes for p in pulled) == [0, manifest.num_bytes]
    assert same_files(run, folder)
    assert os.listdir(folder) == ["v000001"]
