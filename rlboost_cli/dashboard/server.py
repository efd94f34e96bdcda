"""Serves the page of every run of this machine to browsers; it reads runs and can change nothing.

Nobody without the key sees anything: it comes with the address that `rlboost dashboard` prints, and stays in
the browser as a cookie. All viewers of a run share one reading of it, so that its coordinator is asked once
a second at most, however many look.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from msgspec import to_builtins

from rlboost_cli.dashboard.data import MAX_SAMPLES, encoded, run_data
from rlboost_cli.dashboard.page import (
    LIST_SCRIPT,
    SCRIPTS,
    SERVED_POLICY,
    STYLES,
    asset,
    runs_page,
    served_page,
)
from rlboost_cli.dashboard.what_if import WhatIf
from rlboost_cli.runs.compare import compare_runs
from rlboost_cli.runs.files import Tail, log_names, sample_rows
from rlboost_cli.runs.refresh import look_at
from rlboost_cli.runs.run_status import runs_table
from rlboost_cli.views.log_lines import LogLines
from rlboost_runtime.errors import NotFound, RLBoostError
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.run.index import all_runs, find_run

EVERY_S = 1.0
"""Shortest time between two readings of a run."""
ALIVE_EVERY_S = 15.0
"""A silent stream sends a comment this often, so that a viewer who left is noticed."""
LOG_LINES = 500
_COOKIE = "rlboost"
_TYPES = {"css": "text/css", "js": "text/javascript"}


@dataclass
class _Reading:
    """A run as it was when it was last read: each part of its figures as JSON."""

    run: RunFolder
    lock: threading.Lock = field(default_factory=threading.Lock)
    read_at: float = -EVERY_S
    step: int = 0
    parts: dict[str, bytes] = field(default_factory=dict)
    what_if: WhatIf = field(init=False)

    def __post_init__(self) -> None:
        self.what_if = WhatIf(self.run)

    def now(self) -> dict[str, bytes]:
        """Return the parts, at most `EVERY_S` old. An ended run is read once."""
        with self.lock:
            if time.monotonic() - self.read_at < EVERY_S:
                return self.parts
            if self.parts.get("has_ended") != b"true":
                look_at(self.run, lambda words: None, ledger=True, logs=True)
                data = run_data(self.run)
                self.step = data["status"]["step"]
                self.parts = {name: encoded(part) for name, part in data.items()}
            has_ended = self.parts["has_ended"] == b"true"
            simulated = encoded(self.what_if.now(self.step, has_ended=has_ended))
            self.parts = {**self.parts, "what_if": simulated}  # streams compare with the former ones
            self.read_at = time.monotonic()
            return self.parts


class DashboardServer(ThreadingHTTPServer):
    """The server. `url` is where it listens, with the key; `serve_forever` serves until `shutdown`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        *,
        key: str | None = None,
        only: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`key`: None for a new one. `only`: the run that alone is shown. `tls`: None for plain HTTP.

        Raises `OSError` where the address cannot be taken. Port 0 takes a free one."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self._host = host
        self.key = secrets.token_urlsafe(24) if key is None else key
        self._only = only
        self._tls = tls
        self._readings: dict[str, _Reading] = {}
        self._lock = threading.Lock()

    def url(self, run: str | None = None) -> str:
        """Return the address of a run's page, or of the list, with the key."""
        shown = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{shown}:{self.server_port}/{f'runs/{run}/' if run else ''}?key={self.key}"

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection; its TLS handshake is its own thread's."""
        connection, address = super().get_request()
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def find(self, name: str) -> RunFolder:
        """Return a run that may be shown. Raises `NotFound`."""
        if self._only is not None and name != self._only:
            raise NotFound(f"this page is that of {self._only} alone", "open the one of the other run")
        return find_run(name)

    def shown(self) -> list[RunFolder]:
        """Return all runs that may be shown, oldest first."""
        return [run for run in all_runs() if self._only in (None, run.name)]

    def reading(self, name: str) -> _Reading:
        """Return the shared reading of a run. Raises `NotFound`."""
        run = self.find(name)
        with self._lock:
            return self._readings.setdefault(run.name, _Reading(run))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A viewer who went away is no error; anything else has been answered already."""


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer one request."""
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        asked = {name: values[-1] for name, values in query.items()}
        if self._is_key(asked.get("key", "")):
            return self._let_in(url.path)
        if not self._is_key(self._cookie()):
            return self._send(
                HTTPStatus.UNAUTHORIZED,
                "text/plain",
                b"The address needs the key that rlboost dashboard printed.\n",
            )
        try:
            if url.path == "/compare/data":
                self._send_json(self._comparison(query.get("run", [])))
            else:
                self._answer(url.path.strip("/").split("/"), asked)
        except RLBoostError as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"{error.problem}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the first one has the key in it."""

    def _answer(self, parts: list[str], asked: dict[str, str]) -> None:
        match parts:
            case [""]:
                shown = {run.name for run in self.server.shown()}
                self._send_page(runs_page([row for row in runs_table() if row["run"] in shown]))
            case ["static", *rest] if "/".join(rest) in {*STYLES, *SCRIPTS, LIST_SCRIPT}:
                name = "/".join(rest)
                self._send(HTTPStatus.OK, _TYPES[name.rpartition(".")[2]], asset(name).encode())
            case ["compare"]:
                self._send_page(served_page("Runs compared"))
            case ["runs", name]:
                self._send_page(served_page(self.server.find(name).name))
            case ["runs", name, "events"]:
                self._stream(self.server.reading(name))
            case ["runs", name, "samples"]:
                self._send_json(sample_rows(self.server.find(name), MAX_SAMPLES, asked.get("text", "")))
            case ["runs", name, "logs"] if "name" in asked:
                self._send_json(_log_lines(self.server.find(name), asked["name"]))
            case ["runs", name, "logs"]:
                self._send_json(log_names(self.server.find(name)))
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"There is no such page.\n")

    def _stream(self, reading: _Reading) -> None:
        """Send the figures, then each part that changes, until the viewer leaves or the run's end is sent."""
        self._send(HTTPStatus.OK, "text/event-stream", None)
        sent: dict[str, bytes] = {}
        silent_since = time.monotonic()
        while True:
            parts = reading.now()
            changed = {name: part for name, part in parts.items() if sent.get(name) != part}
            if changed.keys() - {"at"}:
                body = b",".join(b'"%s":%s' % (name.encode(), part) for name, part in changed.items())
                self.wfile.write(b"data: {%s}\n\n" % body)
                sent, silent_since = parts, time.monotonic()
            elif time.monotonic() - silent_since > ALIVE_EVERY_S:
                self.wfile.write(b": alive\n\n")
                silent_since = time.monotonic()
            self.wfile.flush()
            time.sleep(EVERY_S)

    def _comparison(self, names: list[str]) -> dict[str, Any]:
        """Return the runs that can be compared, and how those of `names` compare, as `compare --json`."""
        folders = [self.server.find(name) for name in dict.fromkeys(names)]
        for folder in folders:
            look_at(folder, lambda words: None, ledger=True, logs=True)
        found = to_builtins(compare_runs(folders)) if len(folders) > 1 else None
        return {"names": [run.name for run in reversed(self.server.shown())], "found": found}

    def _let_in(self, path: str) -> None:
        """Keep the key in the browser and out of its address line."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Set-Cookie", f"{_COOKIE}={self.server.key}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Location", "/" + path.lstrip("/"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.key.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _send_page(self, text: str) -> None:
        self._send(HTTPStatus.OK, "text/html", text.encode())

    def _send_json(self, value: Any) -> None:
        self._send(HTTPStatus.OK, "application/json", json.dumps(value).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes | None) -> None:
        """Send an answer; without a `body` only its head: a stream follows, which ends the connection."""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", SERVED_POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if body is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body is not None:
            self.wfile.write(body)


def _log_lines(run: RunFolder, name: str) -> list[str]:
    parts = list(Tail(run, name, LOG_LINES).read())
    return LogLines(run.logs).of(parts)[-LOG_LINES:] if parts else []
