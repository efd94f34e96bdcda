"""Fetching a public trace from an origin that is slow, broken, changed or away: a server on this machine."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlboost_runtime.errors import ConfigError, ProviderError
from rlboost_runtime.traces.catalogue import KNOWN, KnownTrace, cached, fetch_trace

pytestmark = pytest.mark.integration

BYTES = b"".join(f"{k * 1000},add,node{k}\n".encode() for k in range(500))
TRACE = KnownTrace(
    *("tiny", "for tests", "nobody/nothing", "0" * 40, "tiny.csv", "MIT"),
    *(len(BYTES), hashlib.sha256(BYTES).hexdigest(), 1.0, 1.0, 1, 0),
)


class Origin(ThreadingHTTPServer):
    """Serves `body`; `misbehaves` names what goes wrong; `asked` are the ranges that were asked for."""

    daemon_threads = True
    misbehaves = ""
    body = BYTES

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str | None] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/tiny.csv"


class Answer(BaseHTTPRequestHandler):
    server: Origin

    def do_GET(self) -> None:
        asked, body = self.headers["Range"], self.server.body
        self.server.asked.append(asked)
        if self.server.misbehaves == "404":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if asked and self.server.misbehaves != "no ranges":
            self.send_response(206)
            shift = 7 if self.server.misbehaves == "wrong range" else 0
            self.send_header("Content-Range", f"bytes {start + shift}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
            start = 0
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self._send(body[start:])

    def _send(self, body: bytes) -> None:
        match self.server.misbehaves:
            case "breaks off":
                self.wfile.write(body[: len(body) // 3])
            case "falls silent":
                self.wfile.write(body[:100])
                self.server.over.wait(20)
            case "trickles":
                for byte in body:
                    if self.server.over.wait(0.05):
                        return
                    self.wfile.write(bytes([byte]))
            case _:
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def origin() -> Iterator[Origin]:
    with Origin() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def test_what_is_fetched_is_whole_and_fetched_once(origin: Origin, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_trace(TRACE, tmp_path / "new", url=origin.url, progress=lambda *n: seen.append(n))
    assert path.read_bytes() == BYTES
    assert seen[-1] == (len(BYTES), len(BYTES))
    assert fetch_trace(TRACE, tmp_path / "new", url=origin.url) == path
    assert origin.asked == [None]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_harmed_copy_is_fetched_again(origin: Origin, tmp_path: Path) -> None:
    path = fetch_trace(TRACE, tmp_path, url=origin.url)
    path.write_bytes(BYTES[:-1] + b"x")
    assert cached(TRACE, tmp_path) is None
    assert fetch_trace(TRACE, tmp_path, url=origin.url).read_bytes() == BYTES


@pytest.mark.parametrize("understands", ["", "no ranges"])
def test_a_fetch_that_broke_off_goes_on_where_it_was(
    understands: str, origin: Origin, tmp_path: Path
) -> None:
    origin.misbehaves = "breaks off"
    with pytest.raises(
        ProviderError, match=rf"sent {len(BYTES) // 3:,} bytes of {len(BYTES):,}|IncompleteRead"
    ):
        fetch_trace(TRACE, tmp_path, url=origin.url)
    origin.misbehaves = understands
    assert fetch_trace(TRACE, tmp_path, url=origin.url).read_bytes() == BYTES
    assert origin.asked == [None, f"bytes={len(BYTES) // 3}-"]


def test_an_answer_from_elsewhere_in_the_file_is_refused(origin: Origin, tmp_path: Path) -> None:
    origin.misbehaves = "breaks off"
    with pytest.raises(ProviderError):
        fetch_trace(TRACE, tmp_path, url=origin.url)
    origin.misbehaves = "wrong range"
    with pytest.raises(ProviderError, match="answered a request from byte"):
        fetch_trace(TRACE, tmp_path, url=origin.url)
    origin.misbehaves = ""
    assert fetch_trace(TRACE, tmp_path, url=origin.url).read_bytes() == BYTES


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (BYTES[:-1] + b"x", "other bytes than are known"),
        (BYTES + b"x", "sent more than"),
        (BYTES[:-1], "bytes of"),
        (b"", "sent 0 bytes"),
    ],
)
def test_a_changed_origin_is_told_and_nothing_wrong_is_kept(
    body: bytes, found: str, origin: Origin, tmp_path: Path
) -> None:
    origin.body = body
    with pytest.raises(ProviderError, match=found) as told:
        fetch_trace(TRACE, tmp_path, url=origin.url)
    assert told.value.exit_code == 7
    origin.body = BYTES
    assert fetch_trace(TRACE, tmp_path, url=origin.url).read_bytes() == BYTES


@pytest.mark.parametrize("misbehaves", ["falls silent", "trickles"])
def test_a_slow_origin_is_given_up_at_the_deadline_and_the_rest_comes_later(
    misbehaves: str, origin: Origin, tmp_path: Path
) -> None:
    origin.misbehaves = misbehaves
    begun = time.monotonic()
    with pytest.raises(ProviderError, match=r"timed out|deadline"):
        fetch_trace(TRACE, tmp_path, url=origin.url, deadline_s=0.5)
    assert time.monotonic() - begun < 5
    origin.over.set()
    origin.misbehaves = ""
    assert fetch_trace(TRACE, tmp_path, url=origin.url).read_bytes() == BYTES
    assert origin.asked[1] is not None
    assert origin.asked[1] != "bytes=0-"


def test_an_origin_that_is_away_exits_7_with_what_to_do(origin: Origin, tmp_path: Path) -> None:
    origin.misbehaves = "404"
    with pytest.raises(ProviderError, match="answered 404"):
        fetch_trace(TRACE, tmp_path, url=origin.url)
    with pytest.raises(ProviderError, match="refused") as told:
        fetch_trace(TRACE, tmp_path, url="http://127.0.0.1:1/tiny.csv")
    assert told.value.exit_code == 7
    assert "--from" in told.value.remedy


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://a/b", "tiny.csv", "http:///x"])
def test_what_is_no_web_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no web address"):
        fetch_trace(TRACE, tmp_path, url=url)


def test_every_known_trace_has_a_pinned_origin() -> None:
    for trace in KNOWN.values():
        assert len(trace.sha256) == 64
        assert len(trace.commit) == 40
        assert trace.url.startswith("https://")
        assert trace.commit in trace.url
        assert trace.licence
