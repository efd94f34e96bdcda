"""`rlboost generate`: each row once, through refusals, lost connections and its own death."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlboost_cli.runs import batch as batch_module
from rlboost_cli.runs.batch import Batch, read_rows
from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.security import create_secrets, server_context


class Endpoint:
    """Answers with the prompt; every third request it cannot serve at first, every fifth it cuts off."""

    def __init__(self, run: RunFolder) -> None:
        self.asked: Counter[str] = Counter()
        self.ids: dict[str, str] = {}
        self.status = 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.headers["Authorization"] == f"Bearer {run.api_keys.read_text().strip()}"
                row = body.get("prompt", "chat")
                endpoint.asked[row] += 1
                assert (
                    endpoint.ids.setdefault(row, self.headers["X-Request-ID"]) == self.headers["X-Request-ID"]
                )
                number = len(endpoint.asked)
                if endpoint.asked[row] == 1 and number % 5 == 0:
                    return
                status = 503 if endpoint.asked[row] == 1 and number % 3 == 0 else 200
                status = endpoint.status or (400 if row == "bad" else status)
                text = {"error": {"message": "no"}} if status >= 400 else {"path": self.path, "said": row}
                self.send_response(status)
                self.send_header("Retry-After", "0.01")
                self.end_headers()
                self.wfile.write(json.dumps(text).encode())

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket = server_context(run).wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        write_json(run.api_endpoint, {"url": f"https://127.0.0.1:{self.server.server_port}"})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(batch_module, "RETRY_S", 0.01)
    folder = RunFolder(tmp_path / "served")
    folder.path.mkdir()
    create_secrets(folder)
    return folder


@pytest.fixture
def endpoint(run: RunFolder) -> Iterator[Endpoint]:
    made = Endpoint(run)
    yield made
    made.server.shutdown()
    made.server.server_close()


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Killed(Exception):
    """What a SIGKILL does to a process, for a test within it."""


def test_each_row_is_answered_once_through_a_death_of_the_batch(
    run: RunFolder, endpoint: Endpoint, tmp_path: Path
) -> None:
    prompts = [f"row {i}" for i in range(20)] + ["bad"]
    rows = read_rows(written(tmp_path / "in", *({"prompt": p} for p in prompts), {"messages": []}))
    out = tmp_path / "out"

    def die(done: int) -> None:
        if done >= 8:
            raise Killed

    with pytest.raises(Killed):
        Batch(run, rows, out, 3).run(die)
    kept = out.read_bytes()
    assert 8 <= kept.count(b"\n") < 22
    out.write_bytes(kept + b'{"row": 21, "dig')  # the machine died while it was written
    second = Batch(run, rows, out, 3)
    assert len(second.left) == 22 - kept.count(b"\n")
    counts: list[int] = []
    assert second.run(counts.append) == 1
    assert counts[-1] == 22
    assert out.read_bytes().startswith(kept)
    found = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda each: each["row"])
    assert [each["row"] for each in found] == list(range(22))
    assert [each["response"]["said"] for each in found[:20]] == prompts[:20]
    assert found[20]["error"] == {"message": "no"}
    assert [each["response"]["path"] for each in (found[0], found[21])] == [
        "/v1/completions", "/v1/chat/completions",
    ]  # fmt: skip
    assert len(set(endpoint.ids.values())) == 22
    before = endpoint.asked.total()
    assert Batch(run, rows, out, 3).run(counts.append) == 0
    assert endpoint.asked.total() == before, "what is answered is not asked again"


def test_an_output_of_another_input_is_refused_and_untouched(
    run: RunFolder, endpoint: Endpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    Batch(run, read_rows(written(tmp_path / "in", {"prompt": "one"})), out, 1).run(lambda _: None)
    other = read_rows(written(tmp_path / "in", {"prompt": "two"}))
    with pytest.raises(ConfigError, match="out:1 is no answer to a row of the input"):
        Batch(run, other, out, 1)


@pytest.mark.parametrize("line", ["{", "[]", '{"prompts": "x"}', "7"])
def test_a_row_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "in"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(ConfigError, match="in:2"):
        read_rows(path)


def test_a_run_that_ends_or_a_key_that_is_gone_ends_the_batch(
    run: RunFolder, endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_rows(written(tmp_path / "in", {"prompt": "one"}))
    endpoint.status = 401
    with pytest.raises(RuntimeFault, match="no key that is good"):
        Batch(run, rows, tmp_path / "out", 1).run(lambda _: None)
    endpoint.status = 503
    monkeypatch.setattr(batch_module, "PATIENCE_S", 0.1)
    with pytest.raises(RuntimeFault, match="has not answered"):
        Batch(run, rows, tmp_path / "out", 1).run(lambda _: None)
    write_json(run.ending, {"state": "done"})
    with pytest.raises(RuntimeFault, match="has ended"):
        Batch(run, rows, tmp_path / "out", 1).run(lambda _: None)
