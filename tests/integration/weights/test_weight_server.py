from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rlboost_runtime.run import in_memory, security
from rlboost_runtime.run.folder import RunFolder, read_json
from rlboost_runtime.weights.manifest import Probe, decode_manifest
from rlboost_runtime.weights.pull.range_client import RECEIVER_HEADER
from rlboost_runtime.weights.serve import connections, peer, server
from rlboost_runtime.weights.store.store import WeightStore

pytestmark = pytest.mark.integration

PROBE = Probe((1,), (2,), (-0.5,), 0.1)


def writer(body: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        header = json.dumps(
            {"w": {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}}
        ).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text("{}")

    return write


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    security.create_secrets(run)
    return run


@contextmanager
def serving(run: RunFolder, linger_s: float = 15.0) -> Iterator[int]:
    """Run the server in a thread; yields its port."""
    stop = threading.Event()
    run.weights_endpoint.unlink(missing_ok=True)
    thread = threading.Thread(target=server.serve, args=(run, stop, linger_s))
    thread.start()
    try:
        wait_until(run.weights_endpoint.exists)
        yield int(read_json(run.weights_endpoint)["url"].rsplit(":", 1)[1])
    finally:
        stop.set()
        thread.join(10)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def client(run: RunFolder, port: int) -> Iterator[http.client.HTTPSConnection]:
    context = security.client_context(run.certificate.read_text())
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        yield connection
    finally:
        connection.close()


def get(
    run: RunFolder, port: int, path: str, token: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    headers["Authorization"] = f"Bearer {security.read_token(run) if token is None else token}"
    with client(run, port) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()


def test_files_of_a_version_come_whole_and_in_ranges(run: RunFolder) -> None:
    manifest = WeightStore(run.weights).publish(3, writer(os.urandom(300_000)), PROBE)
    data = (run.weights / "v000003" / "model.safetensors").read_bytes()
    with serving(run) as port:
        assert json.loads(get(run, port, "/v1/weights/latest")[2]) == {"version": 3}
        assert decode_manifest(get(run, port, "/v1/weights/3/manifest.json")[2]) == manifest
        path = "/v1/weights/3/model.safetensors"
        assert get(run, port, path)[::2] == (200, data)
        status, headers, body = get(run, port, path, Range="bytes=1000-1999")
        assert (status, body) == (206, data[1000:2000])
        assert headers["Content-Range"] == f"bytes 1000-1999/{len(data)}"
        status, headers, body = get(run, port, path, Range=f"bytes={len(data) - 5}-{len(data) + 100}")
        assert (status, body) == (206, data[-5:])
        status, headers, _ = get(run, port, path, Range=f"bytes={len(data)}-{len(data) + 5}")
        assert status == 416
        assert headers["Content-Range"] == f"bytes */{len(data)}"


def test_one_connection_serves_many_requests(run: RunFolder) -> None:
    WeightStore(run.weights).publish(3, writer(os.urandom(100_000)), PROBE)
    data = (run.weights / "v000003" / "model.safetensors").read_bytes()
    headers = {"Authorization": f"Bearer {security.read_token(run)}"}
    with serving(run) as port, client(run, port) as connection:
        for start in range(0, 50_000, 10_000):
            wanted = {"Range": f"bytes={start}-{start + 9_999}"}
            connection.request("GET", "/v1/weights/3/model.safetensors", headers=headers | wanted)
            sock = connection.sock
            assert connection.getresponse().read() == data[start : start + 10_000]
            assert connection.sock is sock


def test_a_connection_without_a_thread_for_it_is_closed_and_the_next_is_served(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    WeightStore(run.weights).publish(3, writer(b"a"), PROBE)
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(run) as port:
        monkeypatch.setattr(threading.Thread, "start", refuse_once)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            get(run, port, "/v1/weights/latest")
        assert get(run, port, "/v1/weights/latest")[0] == 200


def test_a_peer_that_cannot_serve_any_more_ends(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(server: peer.WeightHttpServer, _: threading.Event) -> None:
        server.socket.close()
        raise RuntimeError("something unforeseen")

    request = {"folder": str(run.weights), "token": "token", "host": "127.0.0.1"}
    read, write = os.pipe()
    os.write(write, json.dumps(request).encode() + b"\n")
    monkeypatch.setattr(peer.WeightHttpServer, "serve_until", fail)
    agent_gone = threading.Timer(10.0, os.close, (write,))
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        agent_gone.start()
        with pytest.raises(RuntimeError, match="unforeseen"):
            peer.main()
        assert agent_gone.is_alive()
        agent_gone.cancel()
        os.close(write)


def test_what_is_not_there_is_404(run: RunFolder) -> None:
    with serving(run) as port:
        assert get(run, port, "/v1/weights/latest")[0] == 404
        status, _, body = get(run, port, "/v1/weights/9/manifest.json")
        assert status == 404
        assert "version 9" in json.loads(body)["error"]


def test_a_version_that_a_resumed_trainer_has_yet_to_publish_again_is_503(
    run: RunFolder, tmp_path: Path
) -> None:
    """Receivers wait for it; after 404 they would refuse it, and be evicted and bought anew."""
    (root := tmp_path / "memory").mkdir()
    in_memory.move_out(run.weights, root)
    WeightStore(run.weights).publish(3, writer(b"a"), PROBE)
    in_memory.free(run.weights)  # the run has ended
    with serving(run) as port:
        path = "/v1/weights/3/manifest.json"
        assert get(run, port, path)[0] == 503
        assert get(run, port, path.replace("3", "4"))[0] == 404, "it never was"
        in_memory.move_out(run.weights, root)
        WeightStore(run.weights).publish(3, writer(b"a"), PROBE)
        assert get(run, port, path)[0] == 200
        assert get(run, port, path.replace("3", "2"))[0] == 404, "it is gone for good"
    in_memory.free(run.weights)


@pytest.mark.parametrize("path", ["/v1/weights/latest", "/v1/weights/3/manifest.json", "/", "/nowhere"])
@pytest.mark.parametrize("token", ["", "wrong"])
def test_without_the_token_everything_is_401(run: RunFolder, path: str, token: str) -> None:
    WeightStore(run.weights).publish(3, writer(b"a"), PROBE)
    with serving(run) as port:
        assert get(run, port, path, token=token)[0] == 401


def test_nothing_outside_a_versions_files_is_reachable(run: RunFolder) -> None:
    WeightStore(run.weights).publish(3, writer(b"a"), PROBE)
    (run.weights / "stray").write_text("stray")
    (run.weights / "v000003" / "unlisted").write_text("unlisted")
    paths = [
        "/v1/weights/3/.lease",
        "/v1/weights/3/unlisted",
        "/v1/weights/3/",
        "/v1/weights/3",
        "/v1/weights/3/../../secrets/token",
        "/v1/weights/3/..%2f..%2fsecrets%2ftoken",
        "/v1/weights/3/%2e%2e/stray",
        "/v1/weights/3/..%5cstray",
        "/v1/weights/../secrets/token",
        "/v1/weights/..%2fsecrets/token",
        "/v1/weights/3%2f..%2f../stray",
        "/v1/weights/stray",
        "/v1/weights/-3/manifest.json",
        "/v1/weights/v000003/manifest.json",
        f"/v1/weights/3/{run.token}",
        f"/v1/weights/3/{str(run.token).replace('/', '%2f')}",
        "/v1/weights/3/manifest.json%00",
        "/v1/weights/%d9%a3/manifest.json",
    ]
    with serving(run) as port:
        for path in paths:
            assert get(run, port, path)[0] in (400, 404), path


def test_a_version_stays_while_it_is_being_pulled_and_a_little_after(run: RunFolder) -> None:
    store = WeightStore(run.weights, keep=1)
    store.publish(1, writer(os.urandom(8_000_000)), PROBE)
    headers = {"Authorization": f"Bearer {security.read_token(run)}"}
    with serving(run, linger_s=0.3) as port:
        with client(run, port) as connection:
            connection.request("GET", "/v1/weights/1/model.safetensors", headers=headers)
            response = connection.getresponse()
            response.read(1000)
            store.publish(2, writer(b"b"), PROBE)
            time.sleep(0.5)  # longer than the linger: the answer under way is what holds it
            assert store.collect() == []
            assert len(response.read()) > 7_900_000
        assert store.collect() == []  # the linger
        wait_until(lambda: store.collect() == [1])
        assert get(run, port, "/v1/weights/1/manifest.json")[0] == 404
        assert get(run, port, "/v1/weights/2/manifest.json")[0] == 200


def test_who_shows_no_token_holds_no_connection(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "AUTHORISE_S", 0.5)
    WeightStore(run.weights).publish(3, writer(os.urandom(1000)), PROBE)
    headers = {"Authorization": f"Bearer {security.read_token(run)}"}
    with serving(run) as port, client(run, port) as stranger, client(run, port) as friend:
        friend.request("GET", "/v1/weights/latest", headers=headers)
        assert friend.getresponse().read() == b'{"version": 3}'
        friends = friend.sock
        stranger.connect()
        began = time.monotonic()
        stranger.sock.sendall(b"GET /")  # and nothing more
        with suppress(OSError):  # reset or end of stream
            assert stranger.sock.recv(1) == b""
        assert time.monotonic() < began + 4
        friend.request("GET", "/v1/weights/latest", headers=headers)
        assert friend.getresponse().read() == b'{"version": 3}'
        assert friend.sock is friends


def test_who_reads_nothing_is_cut_off_and_nobody_else(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.5)
    store = WeightStore(run.weights)
    store.publish(3, writer(os.urandom(48_000_000)), PROBE)  # more than the kernels keep under way
    headers = {"Authorization": f"Bearer {security.read_token(run)}", RECEIVER_HEADER: "asleep"}
    with serving(run) as port, client(run, port) as sleeper, client(run, port) as friend:
        friend.request("GET", "/v1/weights/latest", headers=headers)
        assert friend.getresponse().read() == b'{"version": 3}'
        friends = friend.sock
        sleeper.request("GET", "/v1/weights/3/model.safetensors", headers=headers)
        response = sleeper.getresponse()
        wait_until(lambda: "weights.receiver_cut_off" in caplog.text)
        with pytest.raises((http.client.IncompleteRead, OSError)):
            response.read()
        friend.request("GET", "/v1/weights/latest", headers=headers)
        assert friend.getresponse().read() == b'{"version": 3}'
        assert friend.sock is friends, "a connection on which nothing is sent is left alone"


def test_a_file_cut_short_while_it_is_sent_ends_the_answer_not_the_server(run: RunFolder) -> None:
    store = WeightStore(run.weights)
    store.publish(3, writer(os.urandom(32_000_000)), PROBE)
    headers = {"Authorization": f"Bearer {security.read_token(run)}"}
    with serving(run) as port:
        with client(run, port) as connection:
            connection.request("GET", "/v1/weights/3/model.safetensors", headers=headers)
            response = connection.getresponse()
            response.read(1000)
            os.truncate(store.path(3) / "model.safetensors", 2_000_000)
            with pytest.raises(http.client.IncompleteRead):
                response.read()
        assert get(run, port, "/v1/weights/latest")[0] == 200


def start(run: RunFolder) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlboost_runtime.weights.serve.server", str(run.path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_process_keeps_its_port_over_a_kill(run: RunFolder) -> None:
    WeightStore(run.weights).publish(3, writer(b"a"), PROBE)
    first = start(run)
    with first:
        wait_until(run.weights_endpoint.exists)
        url = read_json(run.weights_endpoint)["url"]
        port = int(url.rsplit(":", 1)[1])
        assert get(run, port, "/v1/weights/latest")[0] == 200
        first.kill()
    second = start(run)
    with second:
        wait_until(lambda: listens(port))
        assert read_json(run.weights_endpoint)["url"] == url
        assert get(run, port, "/v1/weights/latest")[0] == 200
        second.send_signal(signal.SIGTERM)
        assert second.wait(10) == 0


def test_a_taken_port_is_a_clear_error(run: RunFolder) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        run.weights_endpoint.write_text(json.dumps({"url": f"https://127.0.0.1:{port}"}))
        with start(run) as process:
            assert process.stderr is not None
            text = process.stderr.read().decode()
            assert process.wait(10) == 1
    assert f"port {port}" in text
    assert "Traceback" not in text


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlboost_runtime.weights.serve.server"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert b"usage" in done.stderr
