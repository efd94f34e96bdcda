"""A trace per step by the real OpenTelemetry SDK, read by a collector of ours as its protocol says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer import tracking
from rlboost_runtime.trainer.tracking import Block, Trackers

pytestmark = pytest.mark.integration


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent."""

    requests: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    kept: list[ExportTraceServiceRequest] = []
    handler = type("Keeping", (Collector,), {"requests": kept})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kept
        server.shutdown()


def trackers(folder: Path, url: str) -> Trackers:
    run = RunFolder(folder / "runs" / "traced")
    run.path.mkdir(parents=True)
    fields = {"name": "traced", "model": {"init": "tiny"}, "data": {"source": "p"}, "tracking": {"otlp": url}}
    return Trackers(run, Job.model_validate_json(json.dumps(fields)), 0)


def test_a_step_is_a_trace_with_what_the_trainer_did(
    tmp_path: Path, collector: tuple[str, list[ExportTraceServiceRequest]]
) -> None:
    url, kept = collector
    s = 1_000_000_000
    blocks = [Block("train", 10 * s, 11 * s), Block("train", 11 * s, 12 * s), Block("train", 14 * s, 15 * s)]
    blocks.append(Block("publish", 15 * s, 16 * s))
    with trackers(tmp_path, url) as opened:
        opened.log({"step": 3.0, "step_s": 8.0, "reward_mean": 0.5}, blocks)
        opened.log({"step": 4.0, "eval_reward_mean": 0.5})
    (resource,) = [each for request in kept for each in request.resource_spans]
    told = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (told["service.name"], told["rlboost.run"]) == ("rlboost", "traced")
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    root = next(span for span in spans if not span.parent_span_id)
    assert root.name == "step"
    assert {each.key: each.value.double_value for each in root.attributes}["reward_mean"] == 0.5
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (8 * s, 16 * s)
    children = sorted((span for span in spans if span.parent_span_id), key=lambda x: x.start_time_unix_nano)
    assert {span.parent_span_id for span in children} == {root.span_id}
    assert [(c.name, c.start_time_unix_nano // s, c.end_time_unix_nano // s) for c in children] == [
        ("wait", 8, 10), ("train", 10, 12), ("wait", 12, 14), ("train", 14, 15), ("publish", 15, 16),
    ]  # fmt: skip


def test_a_collector_that_is_away_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "EXPORT_S", 1)
    started = time.monotonic()
    with trackers(tmp_path, "http://127.0.0.1:9") as opened:
        opened.log({"step": 0.0, "step_s": 1.0}, [Block("train", 1, 2)])
        assert time.monotonic() - started < 10
    assert time.monotonic() - started < 60
