"""Notices: what is told, once each, to a real HTTP server and real commands, also through kills."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rlboost_runtime.health import limits
from rlboost_runtime.job.notify import CommandTarget, WebhookTarget
from rlboost_runtime.protocol.status import CostSoFar, HealthWarning, Status
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.supervisor import notify
from rlboost_runtime.supervisor.notices import QUIET_S, NoticeLog, RunView, due


class Hook:
    """A webhook: answers with `answers` in turn, then with 200; `pause_s` before each answer."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.answers: list[int] = []
        self.pause_s = 0.0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                message = json.loads(body)
                assert list(message) == ["text"]
                outer.got.append(message["text"])
                time.sleep(outer.pause_s)
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/T0/SECRET"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def run(tmp_path: Any) -> RunFolder:
    folder = RunFolder(tmp_path / "told")
    folder.path.mkdir()
    write_json(folder.wanted, {"train": True})
    return folder


def status(run: RunFolder, *codes: str, spent: float = 0.0, budget: float | None = None) -> None:
    """Write what the coordinator reports."""
    warnings = [{"code": code, "text": f"{code} & <so>.", "advice": "Look."} for code in codes]
    cost = {"spent_usd": spent, "budget_usd": budget}
    write_json(run.status, {"at": time.time(), "step": 3, "steps": 4, "warnings": warnings, "cost": cost})


def notifier(run: RunFolder, *targets: WebhookTarget | CommandTarget, **tuning: Any) -> notify.Notifier:
    named = {str(number): target for number, target in enumerate(targets)}
    made = notify.Notifier(run, named, look_s=0.02, **{"pause_s": 0.01} | tuning)
    made.recall()
    return made


def states(run: RunFolder) -> list[dict[str, str]]:
    return [notice["targets"] for notice in read_json(run.notified)["notices"].values()]


# --- what is due -------------------------------------------------------------------------------------------


def view(now: float, *codes: str, spent: float = 0.0, **changes: Any) -> RunView:
    warnings = [HealthWarning(code=code, text=f"{code}.", advice="Look.") for code in codes]
    reported = Status(at=now, warnings=warnings, cost=CostSoFar(spent_usd=spent, budget_usd=10.0))
    return RunView(**{"run": "r", "now": now, "since": 0.0, "status": reported} | changes)


def told(log: NoticeLog, seen: RunView) -> list[tuple[str, str]]:
    """Kind and text of what is due; it counts as noted then."""
    found = due(seen, log)
    for each in found:
        log.notices[each.key] = notify.NoticeRecord(each.kind, each.text, seen.now)
    return [(each.kind, each.text) for each in found]


def test_a_warning_is_told_once_as_long_as_it_lasts_or_soon_returns() -> None:
    log = NoticeLog()
    assert told(log, view(1e6, "stuck", "truncated")) == [
        ("stuck", "r: stuck. Look."),
        ("health", "r: truncated. Look."),
    ]
    for second in range(1, 5000, 7):
        assert told(log, view(1e6 + second, "stuck", "truncated")) == []
    assert told(log, view(1e6 + 5000 + QUIET_S / 2, "stuck")) == [], "a restarted coordinator measures anew"
    assert told(log, view(1e6 + 5200 + 2 * QUIET_S, "stuck")) == [("stuck", "r: stuck. Look.")]


def test_each_share_of_a_budget_is_told_once_and_a_raised_budget_anew() -> None:
    log = NoticeLog()
    texts = [text for spent in range(16) for _, text in told(log, view(1e6, spent=float(spent)))]
    assert [text.rpartition("(")[2] for text in texts] == ["50 %).", "80 %).", "100 %)."]
    assert texts[0] == "r has spent $5.00 of its budget of $10.00 (50 %)."
    assert [k for k, _ in told(NoticeLog(), view(1e6, spent=9.0))] == ["budget"], "50 % is no news then"
    ended = view(1e6, spent=9.7, outcome={"state": "stopped", "exit_code": 5})
    assert "(100 %). It has ended." in told(NoticeLog(), ended)[0][1]
    raised = Status(at=1e6, cost=CostSoFar(spent_usd=11.0, budget_usd=20.0))
    assert [k for k, _ in told(log, view(1e6, status=raised))] == ["budget"]


def test_a_coordinator_that_no_longer_reports_is_stuck() -> None:
    silent = Status(at=1e6)
    assert told(NoticeLog(), view(1e6 + limits.STUCK_S - 1, status=silent)) == []
    late = 1e6 + limits.STUCK_S + 1
    assert [kind for kind, _ in told(NoticeLog(), view(late, status=silent))] == ["stuck"]
    assert told(NoticeLog(), view(late, status=silent, since=late - 5)) == [], "this supervisor just began"
    assert told(NoticeLog(), view(late, status=silent, is_training_wanted=False)) == []


def test_what_an_earlier_supervisor_saw_is_not_in_force_now() -> None:
    old = view(1e6, "stuck").status
    assert told(NoticeLog(), view(1e6 + 100, status=old, since=1e6 + 50)) == []


# --- sending -----------------------------------------------------------------------------------------------


async def test_slack_gets_each_notice_once_and_commands_get_their_kinds(run, hook, tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK", hook.url)
    out = tmp_path / "out"
    told_by = CommandTarget(
        command=["sh", "-c", f'cat >> {out}; echo " $RLBOOST_NOTIFY_KIND" >> {out}'], on=["failed"]
    )
    sender = notifier(run, WebhookTarget(webhook="${HOOK}"), told_by)
    status(run, "stuck")
    for _ in range(5):
        sender.look()
    write_json(run.outcome, {"state": "failed", "problem": "No disk.", "remedy": "Make room."})
    await sender.finish()
    ended = "told has failed: 3 of 4 steps, $0.00 spent. No disk. Make room."
    assert sorted(hook.got) == ["told has failed: 3 of 4 steps, $0.00 spent. No disk. Make room.",
                                "told: stuck &amp; &lt;so&gt;. Look."]  # fmt: skip
    assert out.read_text() == f"{ended} failed\n"
    again = notifier(run, WebhookTarget(webhook="${HOOK}"), told_by)
    await again.finish()
    assert len(hook.got) == 2


@pytest.mark.parametrize(
    ("answers", "tries", "state"),
    [([], 1, "sent"), ([503, 429], 3, "sent"), ([500] * 9, notify.TRIES, "failed"), ([404], 1, "failed")],
)
async def test_what_is_refused_is_tried_again_within_bounds(run, hook, answers, tries, state):
    hook.answers = answers
    sender = notifier(run, WebhookTarget(webhook=hook.url))
    status(run, "stuck")
    await sender.finish()
    assert len(hook.got) == tries
    assert states(run) == [{"0": state}]


async def test_an_answer_that_does_not_come_is_final_and_delays_nobody(run, hook):
    hook.pause_s = 5.0
    sender = notifier(run, WebhookTarget(webhook=hook.url), deadline_s=0.2)
    status(run, "stuck")
    began = time.monotonic()
    sender.look()
    assert time.monotonic() - began < 0.1
    write_json(run.outcome, {"state": "stopped"})
    await sender.finish()
    assert states(run) == [{"0": "unclear"}]
    assert len(hook.got) == 1


async def test_a_run_that_is_resumed_does_not_wait_for_what_its_last_end_had_to_tell(run, hook):
    hook.answers = [500] * 9
    sender = notifier(run, WebhookTarget(webhook=hook.url), pause_s=60.0)
    status(run, "stuck")
    write_json(run.outcome, {"state": "failed", "exit_code": 1})
    finishing = asyncio.create_task(sender.finish())
    await asyncio.sleep(0.5)
    assert not finishing.done()
    run.outcome.unlink()
    await asyncio.wait_for(finishing, 5.0)
    assert states(run) == [{"0": "waiting"}, {"0": "waiting"}]
    again = notifier(run, WebhookTarget(webhook=hook.url))
    await again.finish()
    assert states(run) == [{"0": "failed"}], "the warning was tried on; how the run had ended is no news now"
    assert len(hook.got) == 2 + notify.TRIES - 1


async def test_a_command_that_hangs_is_ended_with_its_children(run, tmp_path):
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 60 & echo $! > {pid}; wait"]
    sender = notifier(run, CommandTarget(command=command), deadline_s=0.5)
    status(run, "stuck")
    sender.look()
    write_json(run.outcome, {"state": "stopped"})
    await sender.finish()
    assert states(run) == [{"0": "unclear"}]
    await asyncio.sleep(0.1)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


async def test_neither_logs_nor_the_record_have_the_url(run, hook, caplog):
    caplog.set_level(logging.INFO)
    dead = WebhookTarget(webhook="http://127.0.0.1:9/services/T0/SECRET")
    hook.answers = [404]
    for target in (dead, WebhookTarget(webhook=hook.url), WebhookTarget(webhook="http://[SECRET")):
        sender = notifier(run, target)
        status(run, "stuck")
        sender.log = NoticeLog()
        write_json(run.outcome, {"state": "stopped"})
        await sender.finish()
        assert states(run) == [{"0": "failed"}]
        run.outcome.unlink()
    written = run.notified.read_text() + "".join(f"{r.getMessage()} {vars(r)}" for r in caplog.records)
    assert "notification.failed" in written
    assert "SECRET" not in written
    assert "127.0.0.1" not in written


async def test_a_full_disk_keeps_nobody_from_being_told(run, hook, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NoticeLog, "write", refuse)
    sender = notifier(run, WebhookTarget(webhook=hook.url))
    status(run, "stuck")
    for _ in range(3):
        sender.look()
    await sender.finish()
    assert len(hook.got) == 1


SENDER = """
import asyncio, sys
from pathlib import Path
from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.supervisor.notify import notifying

job = Job.model_validate_json(sys.argv[2])

async def main():
    async with notifying(job, RunFolder(Path(sys.argv[1]))):
        await asyncio.sleep(float(sys.argv[3]))

asyncio.run(main())
"""


def send_as_process(run: RunFolder, url: str, lasts_s: float) -> subprocess.Popen[bytes]:
    job = {"name": "told", "model": {"init": "tiny"}, "data": {"reasoning_gym": ["spell_backward"]}}
    text = json.dumps(job | {"env": {"HOOK": url}, "notify": [{"webhook": "${HOOK}"}]})
    environment = {**os.environ, "HOOK": url, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", SENDER, str(run.path), text, str(lasts_s)], env=environment
    )


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_kill_in_the_middle_of_a_send_repeats_nothing_and_a_later_notice_arrives(run, hook):
    hook.pause_s = 30.0
    first = send_as_process(run, hook.url, 60.0)
    status(run, "truncated")
    while not hook.got and first.poll() is None:  # the coordinator reports every second
        time.sleep(0.1)
        status(run, "truncated")
    first.send_signal(signal.SIGKILL)
    first.wait()
    hook.pause_s = 0.0
    status(run, "truncated")
    write_json(run.outcome, {"state": "done"})
    second = send_as_process(run, hook.url, 0.1)
    assert second.wait(30) == 0
    wait_until(lambda: len(hook.got) == 2)
    assert "truncated" in hook.got[0]
    assert hook.got[1].startswith("told is done: 3 of 4 steps")
    assert send_as_process(run, hook.url, 0.1).wait(30) == 0
    assert len(hook.got) == 2
    assert [list(each.values()) for each in states(run)] == [["unclear"], ["sent"]]


def test_a_resumed_run_s_next_end_is_told_again(run, hook):
    for state in ("failed", "failed", "done"):
        status(run)
        write_json(run.outcome, {"state": state})
        assert send_as_process(run, hook.url, 0.0).wait(30) == 0
        if state == "failed":
            run.outcome.unlink()  # as `launch --resume` does
            assert send_as_process(run, hook.url, 0.0).wait(30) == 0
    assert [text.split(":")[0] for text in hook.got] == ["told has failed", "told has failed", "told is done"]
