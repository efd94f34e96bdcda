"""HTTP for weight versions: byte ranges over TLS, a thread per connection, nothing but GET.

::

    GET /v1/weights/latest            {"version"}; 404 where there is none
    GET /v1/weights/VERSION/FILE      a file of the version's manifest or `manifest.json`; byte ranges work
                                      503 until a resumed trainer has published it again
    GET /v1/weights/VERSION/have      a byte per chunk of the manifest, 1 where it is here
    GET /v1/wheels/FILE               a package for machines (`deploy.wheelhouse`), on the head only

Threads, because sending is the kernel's and OpenSSL's work, which holds no lock of the interpreter: one
process uses several cores, and a slow receiver blocks its own thread only.

Guarantees: without a token every answer is 401; only what the catalog finds is reachable; receivers share
the link, and one that shows no token, or reads next to nothing, is cut off (`weights.serve.connections`).
Files are read, not mapped: one that is truncated meanwhile ends a response, not the process.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseServer, ThreadingMixIn
from typing import Any

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.logs import event
from rlboost_runtime.run import security
from rlboost_runtime.run.credentials import DENIED
from rlboost_runtime.weights.manifest import MANIFEST
from rlboost_runtime.weights.pull.range_client import LEFT_HEADER, RECEIVER_HEADER
from rlboost_runtime.weights.serve.catalog import Catalog, Entry
from rlboost_runtime.weights.serve.connections import UNREAD_S, Connections, FairShare, Sending
from rlboost_runtime.weights.store.store import VersionGone

log = logging.getLogger(__name__)

PIECE_BYTES = 1024 * 1024
"""Sent between two checks of the shares."""
READ_BYTES = 256 * 1024
"""Read at once for encryption: stays in a core's cache until it is encrypted."""
HANDSHAKE_S = 10.0
IDLE_S = 60.0
"""A connection without a request for this long is closed."""
POLL_S = 0.1

_FILE = re.compile(r"/v1/weights/([0-9]{1,12})/([A-Za-z0-9_.-]{1,128})", re.ASCII)
_WHEEL = re.compile(r"/v1/wheels/([A-Za-z0-9_][A-Za-z0-9_.+!-]{0,254})", re.ASCII)
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})", re.ASCII)


class WeightHttpServer(ThreadingMixIn, BaseServer):
    """Serves a catalog on a bound, listening socket; `serve_until` blocks.

    `tls`: None serves plain text, which only measurements do.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        access: str | Callable[[str | None], int],
        catalog: Catalog,
        wheels: Path | None = None,
    ) -> None:
        """`access`: the one token that opens it, or what judges an `Authorization` header: 200, 401, 403.
        `wheels`: folder of packages; None: none are served."""
        super().__init__(listener.getsockname(), _Handler)
        self.socket = listener
        self.tls = tls
        self.status_for = _only(access) if isinstance(access, str) else access
        self.catalog = catalog
        self.wheels = wheels
        self.shares = FairShare()
        self.connections = Connections()
        listener.setblocking(True)
        listener.settimeout(POLL_S)
        if sys.platform == "linux":  # accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))

    def serve_until(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, then close all connections: pullers resume elsewhere or later."""
        tidied = time.monotonic()
        try:
            while not stop.is_set():
                self._accept()
                if time.monotonic() > tidied + POLL_S:
                    self.catalog.tidy()
                    self.connections.check()
                    tidied = time.monotonic()
        finally:
            self.socket.close()
            self.connections.shut()
            self.catalog.close()

    def _accept(self) -> None:
        try:
            connection, address = self.socket.accept()
        except TimeoutError:
            return
        except OSError as exc:  # the peer is gone already, or we are out of descriptors
            event(log, "weights.accept_failed", level=logging.WARNING, problem=str(exc))
            time.sleep(POLL_S)
            return
        if not self.connections.add(connection):
            return
        try:
            self.process_request(connection, address)
        except RuntimeError as exc:  # no thread for it; others will end
            event(log, "weights.accept_failed", level=logging.WARNING, problem=str(exc))
            self.shutdown_request(connection)

    def shutdown_request(self, request: Any) -> None:  # socketserver's own type
        """Close a connection."""
        self.connections.drop(request)
        with suppress(OSError):
            request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:  # socketserver's own types
        """Log what went wrong with one connection; receivers that vanish are the normal case."""
        if not isinstance(sys.exception(), OSError):  # also ssl.SSLError
            log.exception("a connection failed")


def _only(token: str) -> Callable[[str | None], int]:
    return lambda header: 200 if security.authorised(header, token) else 401


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server: WeightHttpServer

    def setup(self) -> None:
        plain = self.request
        self._connection = self.server.connections.of(plain)
        plain.settimeout(HANDSHAKE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.server.tls is not None:
            self.request = self.server.tls.wrap_socket(plain, server_side=True)
            self._connection.sock = self.request
        super().setup()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        if self.server.tls is not None:
            with suppress(OSError):
                self.request.close()

    def log_message(self, *_: object) -> None:
        """Log nothing: pulls are logged where they end."""

    def do_GET(self) -> None:
        """Serve the newest version's number, a file, or the marks of a version."""
        status = self.server.status_for(self.headers.get("Authorization"))
        if status != 200:
            self._send_json(status, {"error": DENIED})
            return
        self._connection.is_authorised = True
        catalog = self.server.catalog
        if self.path == "/v1/weights/latest":
            version = catalog.latest()
            if version is None:
                self._send_json(404, {"error": "no version is published yet"})
            else:
                self._send_json(200, {"version": version})
            return
        if (wheel := _WHEEL.fullmatch(self.path)) is not None and self.server.wheels is not None:
            self._answer_file(self.server.wheels / wheel[1], "there is no such package")
            return
        match = _FILE.fullmatch(self.path)
        if match is None:
            self._send_json(404, {"error": "no such resource"})
            return
        version, name = int(match[1]), match[2]
        try:
            with catalog.reading(version) as entry:
                self._answer(entry, name)
        except VersionGone:
            if catalog.awaits(version):
                self._send_json(503, {"error": f"the trainer has not published version {version} again yet"})
            else:
                self._send_json(404, {"error": f"version {version} is not here, or no longer"})
        except ProtocolError as exc:
            event(log, "weights.manifest_broken", level=logging.ERROR, version=version, problem=exc.problem)
            self._send_json(500, {"error": exc.problem})

    def _answer(self, entry: Entry, name: str) -> None:
        if name == "have":
            self._send_body(200, entry.marks(), "application/octet-stream")
            return
        path = entry.file(name)
        if path is None:
            self._send_json(404, {"error": f"version {entry.manifest.version} has no such file"})
            return
        self._answer_file(path, f"version {entry.manifest.version} no longer has {name}", entry)

    def _answer_file(self, path: Path, absent: str, entry: Entry | None = None) -> None:
        try:
            with path.open("rb") as file:
                self._send_file(entry, path, file.fileno())
        except FileNotFoundError:
            self._send_json(404, {"error": absent})

    def _send_file(self, entry: Entry | None, path: Path, fd: int) -> None:
        size = os.fstat(fd).st_size
        wanted = self.headers.get("Range")
        start, end = 0, size
        if wanted is not None:
            match = _RANGE.fullmatch(wanted)
            if match is None:
                self._send_json(400, {"error": "one range of bytes is understood"})
                return
            start = int(match[1])
            end = min(size, int(match[2]) + 1) if match[2] else size
            if start >= end:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        if entry is not None and not entry.has(path.name, start, end):
            self._send_json(409, {"error": "this part is not here yet"})
            return
        self.send_response(200 if wanted is None else 206)
        self.send_header("Content-Length", str(end - start))
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        self._send(fd, start, end, counted=path.name != MANIFEST)

    def _send(self, fd: int, start: int, end: int, *, counted: bool) -> None:
        """Send a part of the file, as the shares allow."""
        left = self.headers.get(LEFT_HEADER, "")
        name = self.headers.get(RECEIVER_HEADER) or str(self.client_address[0])
        sending = self.server.shares.begin(name, int(left) if counted and left.isdecimal() else None)
        try:
            with self._connection.sending_to(name):
                if self.server.tls is None:
                    self._send_plain(sending, fd, start, end)
                else:
                    self._send_encrypted(sending, fd, start, end)
        finally:
            self.server.shares.end(sending)
            self.request.settimeout(IDLE_S)

    def _send_encrypted(self, sending: Sending, fd: int, start: int, end: int) -> None:
        connection, send = self._connection, self.request.send
        self.request.settimeout(None)  # with one, `ssl` would ask the kernel before each 16 KiB
        memory = memoryview(bytearray(min(READ_BYTES, end - start)))
        for at in range(start, end, READ_BYTES):
            if (at - start) % PIECE_BYTES == 0:
                self.server.shares.wait(sending, PIECE_BYTES if at > start else 0)
            piece = memory[: min(READ_BYTES, end - at)]
            if os.preadv(fd, [piece], at) != len(piece):
                raise ConnectionError("the file became shorter")
            while piece:
                count = send(piece)
                piece = piece[count:]
                connection.sent_bytes += count

    def _send_plain(self, sending: Sending, fd: int, start: int, end: int) -> None:
        sock: socket.socket = self.request
        sock.settimeout(UNREAD_S)  # `sendfile` takes what fits, so that it is counted as it goes
        at = start
        count = 0
        while at < end:
            self.server.shares.wait(sending, count)
            count = 0
            with suppress(BlockingIOError):
                count = os.sendfile(sock.fileno(), fd, at, min(PIECE_BYTES, end - at))
                if count == 0:
                    raise ConnectionError("the file became shorter")
                at += count
                self._connection.sent_bytes += count
                continue
            _wait_writable(sock)

    def _send_json(self, status: int, body: dict[str, object]) -> None:
        self._send_body(status, json.dumps(body).encode(), "application/json")

    def _send_body(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _wait_writable(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    poll.poll(1000 * UNREAD_S)  # a receiver that reads nothing for so long is cut off
