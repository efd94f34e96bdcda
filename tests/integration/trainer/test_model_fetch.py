"""A model comes from a hub while its progress is told: a hub of our own, on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.run.folder import RunFolder, read_json

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
PYTHON_PATH = os.pathsep.join(str(ROOT / part) for part in ("", "runtime", "providers", "templates"))
COMMIT = "a" * 40
PIECE = 5_000_000
BIG = 25_000_000  # the library takes 10 MiB at a time and tells of each
FILES = {"config.json": b"{}", "model.safetensors": bytes(BIG), "model.onnx": b"never asked for"}
FETCH = """
import sys
from pathlib import Path
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer.models.hub import fetch
from rlboost_runtime.trainer.models.hub import StartupProgress
fetch("someone/model", StartupProgress(RunFolder(Path(sys.argv[1]))))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for; slow enough to be watched."""

    asked: list[str]

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/someone/model"):
            names = [{"rfilename": name, "path": name, "type": "file", "size": len(d), "oid": "0" * 40}
                     for name, d in FILES.items()]  # fmt: skip
            info = {"id": "someone/model", "sha": COMMIT, "siblings": names}
            self.reply(json.dumps(names if "/tree/" in path else info).encode(), {}, body=body)
            return
        name = path.rpartition("/")[2]
        if name not in FILES:  # the hub's library asks for other things, too
            self.send_error(404)
            return
        if body:
            self.server.asked.append(name)  # type: ignore[attr-defined]
        tag = hashlib.sha256(FILES[name]).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self.reply(FILES[name], headers, body=body)

    def reply(self, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(data) if body else 0, PIECE):
            self.wfile.write(data[start : start + PIECE])
            self.wfile.flush()
            time.sleep(0.7 if len(data) > PIECE else 0.0)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_tells_its_bytes_and_leaves_a_model_in_the_cache(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    told = []
    with subprocess.Popen(
        [sys.executable, "-c", FETCH, str(run.path)],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "PYTHONPATH": PYTHON_PATH,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
            "HF_HOME": str(tmp_path / "hub"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            found = read_json(run.preparing)
            if found is not None and found not in told:
                told.append(found)
            time.sleep(0.02)
        process.kill()
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    assert {each["doing"] for each in told} == {"fetching the model someone/model"}
    amounts = [each["done"] for each in told if each["done"] is not None]
    assert amounts == sorted(amounts)
    assert any(0 < done < BIG for done in amounts), told
    assert {each["unit"] for each in told if each["done"]} == {"B"}
    assert sorted(hub.asked) == ["config.json", "model.safetensors"]  # type: ignore[attr-defined]
    assert any(
        p.read_bytes() == FILES["model.safetensors"] for p in (tmp_path / "hub").rglob("*.safetensors")
    )


def test_a_hub_that_is_not_there_is_left_for_loading_to_explain(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FETCH, str(run.path)],
        env={
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HOME": str(tmp_path / "hub"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
