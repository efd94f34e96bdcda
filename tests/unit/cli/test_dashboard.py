"""The page of a run: its figures, what a report may do in a browser, and who the server lets in."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlboost_cli.dashboard import __main__ as page_process
from rlboost_cli.dashboard.data import encoded, run_data
from rlboost_cli.dashboard.head_page import head_page
from rlboost_cli.dashboard.page import frozen_page, runs_page
from rlboost_cli.dashboard.server import DashboardServer
from rlboost_cli.dashboard.what_if import WhatIf, options_of
from rlboost_cli.main import app
from rlboost_cli.runs.files import sample_rows
from rlboost_runtime.billing.launch_records import MachineRecord
from rlboost_runtime.billing.ledger import Ledger
from rlboost_runtime.errors import NotFound
from rlboost_runtime.job import Dashboard, Job
from rlboost_runtime.run.credentials import holder_of
from rlboost_runtime.run.folder import RunFolder, write_json
from rlboost_runtime.run.security import client_context, create_secrets, read_token

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> \u2028 & <!--'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("RLBOOST_HOME", str(tmp_path))
    run = RunFolder.named("demo")
    (run.logs / "machines" / "spot-1").mkdir(parents=True)
    (run.logs / "trainer.log").write_text('{"at": 1000.0, "level": "info", "event": "step.trained"}\n')
    write_json(run.job_json, {"name": "demo", "algorithm": {"steps": 2}, "budget": {"max_usd": 9}})
    write_json(run.status, {"run": "demo", "state": "done", "step": 2, "started_at": 1000.0, "at": 1100.0})
    write_json(run.outcome, {"state": "done"})
    run.metrics.write_text(
        "".join(
            json.dumps({"step": s, "reward_mean": s / 3, "entropy": float("nan")}) + "\n" for s in range(2)
        )
    )
    rows = [
        {"step": 0.0, "prompt": f"prompt {n}", "response": HOSTILE if n == 1 else "plain", "reward": 0.5}
        for n in range(3)
    ]
    run.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = Ledger(run.ledger)
    ledger.intend(MachineRecord("spot-1", "local", "here", "cpu", 3_600_000_000, "job", 1000.0))
    ledger.launched("spot-1", 1000.0)
    ledger.keep_boots({"spot-1": '{"launched_at": 5.0, "ready_at": 17.5}'})
    ledger.ended("spot-1", 1100.0, "preempted")
    ledger.note(1001.0, "launched", f"spot-1 {HOSTILE}")
    ledger.close()
    return run


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_figures_are_those_of_status_and_cost(run: RunFolder) -> None:
    data = run_data(run)
    status, cost = (
        json.loads(command("status", "demo", "--json")),
        json.loads(command("cost", "demo", "--json")),
    )
    assert data["status"] | {"age_s": 0} == status | {"age_s": 0}
    assert data["cost"] | {"as_of": 0} == cost | {"as_of": 0}
    assert data["cost"]["total_usd"] == 100.0, "100 s at $3,600 per hour"
    assert data["machines"] == [{"id": "spot-1", "detail": "preempted", "boot_s": 12.5}]
    assert data["metrics"]["steps"] == [1, 2]
    assert data["metrics"]["values"]["reward_mean"] == [0.0, 0.333333]
    assert data["metrics"]["values"]["entropy"] == [None, None], "not finite: no JSON number"


def test_nothing_in_the_figures_ends_their_element(run: RunFolder) -> None:
    data = run_data(run, has_samples=True)
    text = encoded(data).decode()
    assert json.loads(text) == data
    assert not set("<>&\u2028") & set(text)


def test_a_report_asks_for_nothing_and_executes_only_its_own_scripts(run: RunFolder) -> None:
    page = frozen_page(run_data(run, has_samples=True))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 3
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    assert not re.search(r"<(script|img|link)[^>]*(src|href)=\"(?!data:)", page), "nothing is loaded"
    assert "alert(1)</script>" not in page


def test_names_in_the_list_of_runs_are_text() -> None:
    row = {"run": "<b>x", "state": "<i>", "step": 1, "steps": None, "reward_mean": 0.5, "spent_usd": 1.5}
    page = runs_page([row])
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page
    assert "$1.50" in page


def test_the_commands_write_a_file_and_a_summary(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    assert command("report", "demo", "-o", str(path)).strip() == str(path)
    assert path.read_text().startswith("<!doctype html>")
    summary = command("report", "demo", "--md")
    assert "**demo**: done" in summary
    assert "| spent | $100.00 |" in summary
    failed = CliRunner().invoke(app, ["report", "demo", "-o", str(tmp_path / "absent" / "x.html")])
    assert failed.exit_code == 2


def test_samples_are_searched_and_bounded(run: RunFolder) -> None:
    assert [row["prompt"] for row in sample_rows(run, 2)] == ["prompt 1", "prompt 2"]
    assert [row["prompt"] for row in sample_rows(run, 9, "ALERT(1)")] == ["prompt 1"]
    assert [row["step"] for row in sample_rows(run, 9, "prompt 0")] == [1]
    assert sample_rows(run, 9, step=2) == []


@pytest.fixture
def server(run: RunFolder) -> Iterator[DashboardServer]:
    with DashboardServer("127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: bytes


@contextmanager
def asking(
    server: DashboardServer, path: str, key: str | None = None, method: str = "GET"
) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)) as connection:
        connection.request(method, path, headers={} if key is None else {"Cookie": f"rlboost={key}"})
        with connection.getresponse() as answer:
            yield answer


def get(server: DashboardServer, path: str, key: str | None = None, method: str = "GET") -> Answer:
    with asking(server, path, key, method) as answer:
        return Answer(answer.status, answer.headers, answer.read())


PATHS = ("/", "/runs/demo/", "/runs/demo/events", "/runs/demo/samples", "/runs/demo/logs", "/static/app.js")
PATHS += ("/compare", "/compare/data?run=demo")


@pytest.mark.parametrize("path", PATHS)
def test_without_the_key_nothing_is_shown(server: DashboardServer, path: str) -> None:
    for key in (None, "", "wrong", server.key[:-1]):
        answer = get(server, path, key)
        assert answer.status == 401
        assert b"demo" not in answer.body
    assert get(server, f"{path}?key=wrong").status == 401


def test_the_address_with_the_key_leaves_it_in_a_cookie(server: DashboardServer) -> None:
    answer = get(server, f"/runs/demo/?key={server.key}")
    assert (answer.status, answer.headers["Location"]) == (303, "/runs/demo/")
    assert answer.headers["Set-Cookie"] == f"rlboost={server.key}; HttpOnly; SameSite=Strict; Path=/"
    assert server.url("demo").endswith(f"/runs/demo/?key={server.key}")


def test_what_the_server_shows(server: DashboardServer, run: RunFolder) -> None:
    assert b'href="/runs/demo/"' in get(server, "/", server.key).body
    page = get(server, "/runs/demo/", server.key)
    assert b'src="/static/app.js"' in page.body
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert json.loads(get(server, "/runs/demo/logs", server.key).body) == ["trainer", "spot-1"]
    assert "step trained" in json.loads(get(server, "/runs/demo/logs?name=trainer", server.key).body)[0]
    found = json.loads(get(server, "/runs/demo/samples?text=alert", server.key).body)
    assert [row["response"] for row in found] == [HOSTILE]


def test_the_page_compares_what_the_command_compares(server: DashboardServer, run: RunFolder) -> None:
    alone = json.loads(get(server, "/compare/data?run=demo", server.key).body)
    assert alone == {"names": ["demo"], "found": None}
    assert b"/compare" not in get(server, "/", server.key).body, "one run has nothing to be compared with"
    shutil.copytree(run.path, run.path.with_name("other"))
    found = json.loads(get(server, "/compare/data?run=demo&run=other", server.key).body)["found"]
    assert found == json.loads(command("compare", "demo", "other", "--json"))
    assert b'href="/compare"' in get(server, "/", server.key).body
    assert b'src="/static/app.js"' in get(server, "/compare?run=demo&run=other", server.key).body


NOTHING = (
    "/compare/data?run=absent",
    "/runs/absent/",
    "/runs/absent/events",
    "/static/../data.py",
    "/runs/../../x/",
    "/x",
)


@pytest.mark.parametrize("path", NOTHING)
def test_there_is_nothing_else(server: DashboardServer, path: str) -> None:
    assert get(server, path, server.key).status == 404
    assert get(server, "/runs/demo/", server.key, method="POST").status == 501


def test_the_stream_begins_with_everything_and_goes_on_with_what_changed(
    server: DashboardServer, run: RunFolder
) -> None:
    run.outcome.unlink()
    with asking(server, "/runs/demo/events", server.key) as answer:
        first = json.loads(answer.readline().removeprefix(b"data: "))
        assert first.keys() == run_data(run).keys() | {"what_if"}
        with run.metrics.open("a") as file:
            file.write('{"step": 2, "reward_mean": 0.7}\n')
        answer.readline()
        second = json.loads(answer.readline().removeprefix(b"data: "))
    assert second["metrics"]["steps"] == [1, 2, 3]
    assert not second.keys() & {"run", "version", "events", "machines"}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_page_of_a_head_shows_its_run_alone_under_the_same_address(run: RunFolder, host: str) -> None:
    """As the head's own process serves it: plain on loopback, else under the run's certificate."""
    create_secrets(run)
    shutil.copytree(run.path, run.path.with_name("other"))
    with pytest.raises(NotFound, match="the head of demo serves no page"):
        head_page(run)
    addresses = set()
    for _ in range(2):  # a restart
        with page_process.start(run, Dashboard(host=host)) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            address = head_page(run)[0]
            addresses.add(address)
            where, _, key = address.partition("/runs/demo/?key=")
            context = client_context(run.certificate.read_text()) if where.startswith("https") else None
            assert (context is None) == (host == "127.0.0.1")

            def ask(path: str, key: str) -> int:
                request = urllib.request.Request(where + path, headers={"Cookie": f"rlboost={key}"})  # noqa: B023
                try:
                    with urllib.request.urlopen(request, timeout=10, context=context) as answer:  # noqa: B023
                        return int(answer.status)
                except urllib.error.HTTPError as refused:
                    return refused.code

            assert ask("/runs/demo/", key) == 200
            assert ask("/runs/other/", key) == 404
            assert ask("/compare/data?run=demo&run=other", key) == 404
            assert ask("/runs/demo/", read_token(run)) == 401, "it is not the run's token"
            assert ask("/runs/demo/", "") == 401
            server.shutdown()
    assert len(addresses) == 1
    assert holder_of(f"Bearer {key}", read_token(run)) is None, "the key opens the page only"


def test_other_machines_are_simulated_once_measured_and_again_as_the_run_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def simulate(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, '{"basis": "b", "options": []}\n', "")

    monkeypatch.setattr("rlboost_cli.dashboard.what_if.subprocess.run", simulate)
    what_if = WhatIf(run)
    assert what_if.now(1, has_ended=False) == {}, "nothing was measured yet"
    assert asked == []
    wait_for(lambda: what_if.now(2, has_ended=False) == {"step": 2, "basis": "b", "options": []})
    what_if.now(3, has_ended=False)
    assert len(asked) == 1, "not each step"
    monkeypatch.setattr("rlboost_cli.dashboard.what_if.AGAIN_S", 0.0)
    wait_for(lambda: what_if.now(3, has_ended=False).get("step") == 3)
    what_if.now(4, has_ended=True)
    assert len(asked) == 2
    fields = {"name": "demo", "model": {"init": "tiny"}, "data": {"source": "prompts.jsonl"}}
    job = Job.model_validate({**fields, "algorithm": {"loss": "sft"}})
    run.job_json.write_text(job.canonical_json())
    assert options_of(run)["problem"].startswith("not simulated: loss sft rolls nothing out")


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
