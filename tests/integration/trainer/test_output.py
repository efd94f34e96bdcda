"""Checkpoints and the final model at a real S3 implementation on loopback, which comes and goes."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import from_url

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer.artifacts.output import COMPLETE, OutputCopies, copying

pytestmark = pytest.mark.integration

URL = "s3://outputs-of-a-test/team"


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/outputs-of-a-test", method="PUT")):
        pass
    yield endpoint
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")):
        server.stop()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "runs" / "r")
    found.checkpoints.mkdir(parents=True)
    found.job_json.write_text("{}")
    return found


def checkpoint(run: RunFolder, step: int, size: int = 1000) -> Path:
    folder = run.checkpoints / f"step-{step:06d}"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes([step]) * size)
    (folder / "state.json").write_text(json.dumps({"step": step}))
    return folder


def there(endpoint: str, key: str) -> bytes | None:
    options: Any = {"allow_http": True}
    bucket = from_url(f"{URL}/r", endpoint=endpoint, client_options=options)
    try:
        return bytes(obstore.get(bucket, key).bytes())
    except FileNotFoundError:
        return None


def requests_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that are written from here on."""
    put, keys = obstore.put, list[str]()

    def noted(store: Any, key: str, *rest: Any) -> object:
        keys.append(key)
        return put(store, key, *rest)

    monkeypatch.setattr(obstore, "put", noted)
    return keys


def test_the_newest_checkpoints_and_the_model_arrive_whole(s3: str, run: RunFolder) -> None:
    output = OutputCopies(URL, run, keep=2)
    with copying(output, is_new=True) as copy:
        for step in (0, 1, 2):
            folder = checkpoint(run, step)
            copy(folder)
            (folder / "state.json").unlink()  # the trainer deletes old ones when it likes
            while there(s3, f"checkpoints/step-{step:06d}/{COMPLETE}") is None:  # up to the test's deadline
                time.sleep(0.05)
    assert there(s3, "job.json") == b"{}"
    assert there(s3, "checkpoints/step-000000/model.safetensors") is None
    assert there(s3, "checkpoints/step-000001/model.safetensors") == bytes([1]) * 1000
    assert json.loads(there(s3, "checkpoints/step-000002/state.json") or b"") == {"step": 2}
    told = json.loads(there(s3, f"checkpoints/step-000002/{COMPLETE}") or b"")
    assert {name: each["size"] for name, each in told.items()} == {
        "model.safetensors": 1000, "state.json": len('{"step": 2}')
    }  # fmt: skip
    run.metrics.write_text('{"step": 2}\n')
    output.finish(checkpoint(run, 2))
    assert there(s3, "model/model.safetensors") == bytes([2]) * 1000
    assert there(s3, "metrics.jsonl") == b'{"step": 2}\n'
    assert not list(run.path.glob(".output-*"))


def test_a_copy_that_was_cut_off_goes_on_with_what_is_missing(
    s3: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(run, 3, size=12 << 20)  # several parts
    output = OutputCopies(URL, run, keep=2)
    put = obstore.put

    def cut_off(store: Any, key: str, *rest: Any) -> object:
        if key.endswith("state.json"):
            raise KeyboardInterrupt  # as good as killed
        return put(store, key, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", cut_off)
        with pytest.raises(KeyboardInterrupt):
            output.finish(folder)
    assert there(s3, f"model/{COMPLETE}") is None
    keys = requests_of(monkeypatch)
    again = OutputCopies(URL, run, keep=2)
    again.finish(folder)
    assert keys == ["model/state.json", f"model/{COMPLETE}"], "the large file was there already"
    keys.clear()
    OutputCopies(URL, run, keep=2).finish(folder)
    assert not keys, "nothing is missing"
    (folder / "model.safetensors").write_bytes(bytes(12 << 20))  # as long, but another model
    OutputCopies(URL, run, keep=2).finish(folder)
    assert keys == ["model/model.safetensors", f"model/{COMPLETE}"]
    assert there(s3, "model/model.safetensors") == bytes(12 << 20)


def test_a_bucket_that_does_not_exist_is_said_before_anything_is_trained(s3: str, run: RunFolder) -> None:
    output = OutputCopies("s3://no-such-bucket/x", run, keep=2)
    with pytest.raises(ConfigError, match="no-such-bucket/x cannot be written") as caught:
        output.begin(is_new=True)
    assert "credentials" in caught.value.remedy
    with pytest.raises(ConfigError, match="cannot be used"):
        OutputCopies("s3://", run, keep=2)


def test_a_checkpoint_that_is_gone_is_said_and_ends_nothing(
    run: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = OutputCopies(str(tmp_path), run, keep=1)
    with copying(output, is_new=True) as copy:
        copy(run.checkpoints / "step-000009")
    assert "output.failed" in caplog.messages


def test_an_outage_stops_no_training_but_the_end_waits_for_it_and_gives_up_in_words(
    credentials: None, run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        output = OutputCopies(URL, run, keep=2, request_s=0.3)
        started = time.monotonic()
        with copying(output, is_new=False) as copy:
            said = time.monotonic()
            copy(checkpoint(run, 1))
            assert time.monotonic() - said < 1, "training does not wait"
        with pytest.raises(RuntimeFault, match="the final model cannot be written") as caught:
            output.finish(checkpoint(run, 1), within_s=1.0, pause_s=0.2)
        assert time.monotonic() - started < 30
    assert str(run.checkpoints) in caught.value.remedy
    assert "--resume" in caught.value.remedy
    assert "output.failed" in caplog.messages


def test_an_outage_that_ends_is_waited_out(s3: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    output = OutputCopies(URL, run, keep=2, request_s=2.0)
    from moto.server import ThreadedMotoServer

    late = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    timer = threading.Timer(0.5, late.start)
    timer.start()
    try:
        output.finish(checkpoint(run, 1), within_s=60.0, pause_s=0.2)
    finally:
        timer.join()
        late.stop()
    assert there(s3, "model/state.json") is not None


@pytest.mark.parametrize("has_links", [True, False])
def test_a_folder_is_an_output_too(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:

        def no_links(*_: object) -> None:
            raise PermissionError("no links here")

        monkeypatch.setattr(os, "link", no_links)
    place = tmp_path / "another disk"
    place.mkdir()
    output = OutputCopies(str(place), run, keep=1)
    with copying(output, is_new=True) as copy:
        copy(checkpoint(run, 7))
    output.finish(checkpoint(run, 7))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        OutputCopies(str(tmp_path / "file"), run, keep=1)
    kept = sorted(str(path.relative_to(place)) for path in place.rglob(COMPLETE))
    assert kept == [f"r/checkpoints/step-000007/{COMPLETE}", f"r/model/{COMPLETE}"]
