"""A real S3 implementation on loopback as holder and relay of versions."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run.bucket import open_bucket
from rlboost_runtime.weights.manifest import MANIFEST, Probe, decode_manifest
from rlboost_runtime.weights.pull.bucket import BucketSource, prune_bucket, upload
from rlboost_runtime.weights.pull.range_client import Absent, Unusable
from rlboost_runtime.weights.serve import server as relaying
from rlboost_runtime.weights.serve.server import BucketUpload
from rlboost_runtime.weights.store.store import WeightStore

pytestmark = pytest.mark.integration

URL = "s3://weights-of-a-test/runs/demo"
PROBE = Probe((1,), (2,), (-0.5,), 0.1)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    import urllib.request

    for method, path in (("POST", "moto-api/reset"), ("PUT", "weights-of-a-test")):  # a process has one moto
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{path}", method=method)):
            pass
    yield endpoint
    server.stop()


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights", chunk_bytes=100_000)


def publish(store: WeightStore, version: int, size: int = 1_000_000) -> Path:
    def write(folder: Path) -> None:
        header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        body = bytes((i * version) % 251 for i in range(1000)) * (size // 1000)
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        (folder / "config.json").write_text("{}")

    store.publish(version, write, PROBE)
    return store.path(version)


def read_file(version: int, name: str, max_bytes: int = 10**6, idle_s: float = 10.0) -> bytes:
    with closing(BucketSource(URL, version, idle_s).stream()) as stream:
        return stream.read_file(name, max_bytes)


def test_versions_are_relayed_read_in_ranges_and_forgotten(s3: str, store: WeightStore) -> None:
    bucket = open_bucket(URL, 10.0)
    for version in (1, 2):
        folder = publish(store, version)
        sent = upload(bucket, folder)
        fresh = {path for path in folder.iterdir() if path.name != ".lease"}
        if version == 2:
            fresh.remove(folder / "config.json")  # as in version 1: it is there already
        assert sent == sum(path.stat().st_size for path in fresh)
    assert upload(bucket, folder) == (folder / MANIFEST).stat().st_size
    stream = BucketSource(URL, 2, 10.0).stream()
    data = (store.path(2) / "model.safetensors").read_bytes()
    manifest = decode_manifest(stream.read_file(MANIFEST, 10**6))
    assert manifest.version == 2
    parts = []
    with stream.open_range("model.safetensors", 100_000, 300_000, len(data)) as fill:
        for _ in range(2):
            part = bytearray(100_000)
            fill(memoryview(part))
            parts.append(bytes(part))
    stream.close()
    assert b"".join(parts) == data[100_000:300_000]
    assert prune_bucket(bucket, keep=1) == [1]
    with pytest.raises(Absent):
        read_file(1, MANIFEST)
    assert read_file(2, "config.json") == b"{}"


def test_an_error_of_the_system_does_not_end_the_relay(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1)
    monkeypatch.setattr(relaying, "POLL_S", 0.01)
    monkeypatch.setattr(relaying, "RETRY_S", 0.01)
    stop, latest = threading.Event(), store.latest
    errors = [OSError(errno.EMFILE, "Too many open files")]

    def fail_once() -> int | None:
        if errors:
            raise errors.pop()
        stop.set()
        return latest()

    monkeypatch.setattr(WeightStore, "latest", lambda _: fail_once())
    BucketUpload(store, f"file://{tmp_path}/bucket").run(stop)
    assert (tmp_path / "bucket" / "v000001" / MANIFEST).exists()


def test_what_a_bucket_answers_is_put_into_words(s3: str, store: WeightStore) -> None:
    stream = BucketSource(URL, 1, 10.0).stream()
    with (
        pytest.raises(Absent, match=r"does not have model\.safetensors"),
        stream.open_range("model.safetensors", 0, 10, 10) as fill,
    ):
        fill(memoryview(bytearray(10)))
    stream.close()
    upload(open_bucket(URL, 10.0), publish(store, 1))
    with pytest.raises(ProtocolError, match="larger than 10 bytes"):
        read_file(1, MANIFEST, max_bytes=10)
    missing = open_bucket("s3://another-bucket/x", 10.0)
    with pytest.raises(RuntimeFault, match="cannot be written to the bucket"):
        upload(missing, store.path(1))


def test_a_bucket_that_does_not_answer_is_unusable_in_time(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Unusable):
        read_file(1, MANIFEST, idle_s=0.5)
