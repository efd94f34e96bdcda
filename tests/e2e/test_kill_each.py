"""SIGKILL each process in turn: the run goes on, or says what to type; after `down` nothing is left."""

from __future__ import annotations

import http.server
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit

pytestmark = pytest.mark.e2e


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What a webhook was told; its URL is in the environment variable HOOK."""
    got: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/T0")
        yield got
    server.shutdown()
    server.server_close()


def test_every_process_may_be_killed_once(told: list[str], cli: Any) -> None:
    """Each notification of the run arrives once."""
    job = cli.job(
        "kills",
        algorithm={"steps": 10, "max_response_tokens": 48},
        secrets=["HOOK"],
        notify=[{"webhook": "${HOOK}", "on": ["done", "failed"]}],
    )
    attached = cli.start("launch", job, "--yes")
    cli.wait("kills", lambda s: s["step"] >= 1, timeout_s=180)

    attached.send_signal(signal.SIGKILL)  # the terminal is closed
    attached.communicate(timeout=60)

    for role in ("coordinator", "trainer", "weights"):
        before = cli.wait("kills", lambda s: True, timeout_s=10)["step"]
        cli.process("kills", role).kill()
        cli.wait("kills", lambda s, b=before: s["step"] > b, timeout_s=120)

    cli.processes("kills", "rlboost_runtime.engines.transformers.child")[0].kill()
    cli.processes("kills", "rlboost_runtime.agent")[0].kill()
    before = cli.wait("kills", lambda s: True, timeout_s=10)["step"]
    cli.wait("kills", lambda s: s["step"] > before, timeout_s=120)

    cli.process("kills", "supervisor").kill()
    time.sleep(1.0)
    said = cli("status", "kills")
    assert "rlboost launch" in said.stdout + said.stderr
    cli("launch", job, "--detach", "--yes")  # adopts what lives
    assert cli.wait_outcome("kills", timeout_s=300)["exit_code"] == 0

    status = cli.json("status", "kills")
    assert status["step"] == 10
    assert (
        status["responses"]["requested"] == status["responses"]["finished"] + status["responses"]["cancelled"]
    )
    assert audit(cli.run_folder("kills")).problems == []
    cli("down", "kills", "--yes")
    assert cli.processes("kills") == []
    assert [text.split(":")[0] for text in told] == ["kills is done"]


def test_down_in_the_middle_leaves_nothing_and_the_run_can_be_resumed(cli: Any) -> None:
    job = cli.job("short", algorithm={"steps": 5})
    cli("launch", job, "--detach", "--yes")
    cli.wait("short", lambda s: s["step"] >= 1, timeout_s=180)
    cli("down", "short", "--yes")
    assert cli.processes("short") == []
    assert cli.json("status", "short")["state"] == "stopped"
    assert cli.json("cost", "short")["total_usd"] > 0
    cli("down", "short", "--yes")  # again: nothing to do
    cli("down", "nobody", "--yes", expect=3)

    cli("launch", job, "--resume", "--yes")
    status = cli.json("status", "short")
    assert (status["state"], status["step"]) == ("done", 5)
    assert len(cli.run_folder("short").metrics.read_text().splitlines()) == 5
    assert cli.processes("short") == []
