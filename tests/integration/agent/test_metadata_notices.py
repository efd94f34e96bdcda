"""Reclaims as AWS, Google Cloud and Azure announce them, from a metadata service on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlboost_providers.aws.traits import REBALANCE_S
from rlboost_providers.base import metadata
from rlboost_providers.base.traits import metadata_of
from rlboost_runtime.agent import notice
from rlboost_runtime.agent.notice import PreemptionNotice, wait_for_announcement, wait_for_notice

pytestmark = pytest.mark.integration


@dataclass
class Service:
    """What the service says by path; `tokens` are those that IMDSv2 has given and still takes."""

    said: dict[str, str] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    broken: bool = False
    garbled: bytes = b""
    """What it sends instead of HTTP."""

    def answer(self, method: str, path: str, headers) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if self.broken:
            return 500, "<html>"
        if path == "/latest/api/token":
            assert method == "PUT"
            assert headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.tokens.add(f"token-{len(self.asked)}")
            return 200, f"token-{len(self.asked)}"
        if path.startswith("/latest/") and headers["X-aws-ec2-metadata-token"] not in self.tokens:
            return 401, ""
        if path.startswith("/computeMetadata/") and headers["Metadata-Flavor"] != "Google":
            return 403, ""
        if path.startswith("/metadata/") and headers["Metadata"] != "true":
            return 400, ""
        text = self.said.get(path.partition("?")[0])
        return (404, "") if text is None else (200, text)


@pytest.fixture
def service(monkeypatch):
    made = Service()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if made.garbled:
                self.wfile.write(made.garbled)
                return
            status, text = made.answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = handle_any

        def log_message(self, format: str, *args) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv(metadata.URL_VARIABLE, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it must not be asked
    monkeypatch.setattr(notice, "ASK_EVERY_S", 0.02)
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def in_seconds(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def test_nothing_announced_is_no_notice(service):
    service.said["/computeMetadata/v1/instance/preempted"] = "FALSE"
    service.said["/computeMetadata/v1/instance/maintenance-event"] = "NONE"
    service.said["/metadata/scheduledevents"] = json.dumps({"DocumentIncarnation": 1, "Events": []})
    assert [metadata_of(cloud).ask() for cloud in ("aws", "gcp", "azure")] == [None, None, None]
    assert metadata_of("local") is None


def test_an_ec2_interruption_tells_its_time_and_a_recommendation_none(service):
    aws = metadata_of("aws")
    service.said["/latest/meta-data/events/recommendations/rebalance"] = json.dumps(
        {"noticeTime": in_seconds(0)}
    )
    assert aws.ask().seconds == REBALANCE_S
    action = {"action": "terminate", "time": in_seconds(110)}
    service.said["/latest/meta-data/spot/instance-action"] = json.dumps(action)
    said = aws.ask()
    assert said.seconds == pytest.approx(110, abs=3)
    assert said.source == "EC2 will terminate it"


def test_a_lapsed_token_is_renewed_and_one_is_kept_while_it_lasts(service):
    aws = metadata_of("aws")
    for _ in range(3):
        assert aws.ask() is None
    assert service.asked.count("PUT /latest/api/token") == 1
    service.tokens.clear()
    assert aws.ask() is None
    assert service.asked.count("PUT /latest/api/token") == 2


@pytest.mark.parametrize("away_s", [-7200, 7200])
def test_a_clock_that_is_hours_wrong_does_not_make_a_notice_endless_or_over(service, away_s):
    action = {"action": "terminate", "time": in_seconds(away_s)}
    service.said["/latest/meta-data/spot/instance-action"] = json.dumps(action)
    assert metadata_of("aws").ask().seconds == 120.0


def test_google_says_preempted_or_stops_for_maintenance_and_a_migration_is_no_notice(service):
    gcp = metadata_of("gcp")
    event = "/computeMetadata/v1/instance/maintenance-event"
    service.said[event] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert gcp.ask() is None
    service.said[event] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert gcp.ask().seconds == 60.0
    service.said["/computeMetadata/v1/instance/preempted"] = "TRUE"
    assert gcp.ask().seconds == 30.0


@pytest.mark.parametrize(("kind", "resource", "is_notice"), [
    ("Preempt", "vm-1", True),
    ("Terminate", "vm-1", True),
    ("Freeze", "vm-1", False),
    ("Preempt", "another-vm", False),
])  # fmt: skip
def test_azure_events_count_where_they_take_this_machine_away(service, kind, resource, is_notice):
    service.said["/metadata/instance/compute/name"] = "vm-1"
    event = {
        "EventType": kind,
        "Resources": [resource],
        "NotBefore": formatdate(time.time() + 25, usegmt=True),
    }
    service.said["/metadata/scheduledevents"] = json.dumps({"Events": [event]})
    said = metadata_of("azure").ask()
    assert (said is not None) == is_notice
    if said is not None:
        assert said.seconds == pytest.approx(25, abs=3)


async def test_a_service_that_fails_for_a_while_is_asked_again(service):
    service.broken = True
    waiting = asyncio.create_task(wait_for_announcement(metadata_of("gcp"), 0.02))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    service.broken = False
    service.said["/computeMetadata/v1/instance/preempted"] = "TRUE"
    async with asyncio.timeout(10):
        assert (await waiting).source == "Google preempts it"


@pytest.mark.parametrize("garbled", [
    b"garbage\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    b'HTTP/1.1 200 OK\r\n\r\n{"Events": [3]}',
    b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000,
], ids=["no HTTP", "cut off", "bad chunk", "200 headers", "no event", "nested"])  # fmt: skip
async def test_garbled_answers_stop_nothing_and_what_is_announced_after_them_is_heard(service, garbled):
    service.garbled = garbled
    waiting = asyncio.create_task(wait_for_announcement(metadata_of("azure"), 0.02))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    service.garbled = b""
    service.said["/metadata/scheduledevents"] = json.dumps({"Events": [{"EventType": "Preempt"}]})
    async with asyncio.timeout(10):
        assert (await waiting).source == "Azure: Preempt"


async def test_a_service_that_says_nonsense_or_is_not_there_stops_nothing(service, monkeypatch, tmp_path):
    service.said["/latest/meta-data/spot/instance-action"] = "soon"
    for is_there in (True, False):
        if not is_there:
            monkeypatch.setenv(metadata.URL_VARIABLE, "http://127.0.0.1:9")
        terminated = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, terminated.set)
        async with asyncio.timeout(10):
            assert (await wait_for_notice(tmp_path, terminated, "aws")).source == "SIGTERM"


async def test_whichever_comes_first_is_the_notice(service, tmp_path):
    waiting = asyncio.create_task(wait_for_notice(tmp_path, asyncio.Event(), "gcp"))
    await asyncio.sleep(0.1)
    service.said["/computeMetadata/v1/instance/preempted"] = "TRUE"
    async with asyncio.timeout(10):
        assert await waiting == PreemptionNotice(30.0, "Google preempts it")
    (tmp_path / "notice.json").write_text(json.dumps({"seconds": 7}))
    async with asyncio.timeout(10):
        assert (await wait_for_notice(tmp_path, asyncio.Event(), "")).seconds == 7
