"""One side of a transfer, as a process of its own, possibly in a network namespace.

    python -m benchmarks.weights.side serve STORE HOST PORT [TLS_FOLDER]   our server
    python -m benchmarks.weights.side raw-serve FILE HOST PORT             sendfile of asked ranges, no HTTP
    python -m benchmarks.weights.side raw-pull URL FILE SIZE STREAMS       recv_into a mapped, prefaulted file
    python -m benchmarks.weights.side pull JSON                            our puller, a `PullRequest`
    python -m benchmarks.weights.side least-serve FILE HOST PORT [seal]    raw, and what must be done:
    python -m benchmarks.weights.side least-pull URL SIZE STREAMS [seal]   see below

Servers say "ready" once they listen. Pulls print one JSON line: seconds, CPU-seconds of this process, bytes.

The *least* sides bound from above what a pull that shares its cores with the server can reach on a machine:
everything is received into memory that is hot in a cache and digested, with *seal* also encrypted and
decrypted (AES-256-GCM, a message per `MESSAGE_BYTES`, by OpenSSL); nothing is written anywhere, and there is
neither HTTP nor TLS.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.child_pipe import PullProgress, PullRequest, PullSource
from rlboost_runtime.weights.pull import pull as pulling
from rlboost_runtime.weights.pull.range_client import RangeStream, WeightSource
from rlboost_runtime.weights.serve.catalog import StoreCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer
from rlboost_runtime.weights.store.store import WeightStore

TOKEN = "bench"
CHUNK_BYTES, MESSAGE_BYTES = 4 * 1024 * 1024, 256 * 1024
"""Digested at once, and sealed at once: what was fastest for each."""
KEY = AESGCM(bytes(32))
NONCE = bytes(12)
"""Of a key that guards nothing."""
SEAL_BYTES = 16
_RANGE = struct.Struct("<QQ")


def serve(store: str, host: str, port: str, tls: str = "") -> None:
    """Serve a store until killed."""
    listener = socket.create_server((host, int(port)), backlog=128)
    context = security.server_context(RunFolder(Path(tls))) if tls else None
    server = WeightHttpServer(listener, context, TOKEN, StoreCatalog(WeightStore(Path(store)), 1.0))
    print("ready", flush=True)
    server.serve_until(threading.Event())


def raw_serve(path: str, host: str, port: str) -> None:
    """Send ranges as they are asked for: the least that any server has to do."""
    listener = socket.create_server((host, int(port)), backlog=128)
    fd = os.open(path, os.O_RDONLY)
    print("ready", flush=True)

    def answer(connection: socket.socket) -> None:
        with connection:
            while len(head := connection.recv(_RANGE.size, socket.MSG_WAITALL)) == _RANGE.size:
                at, length = _RANGE.unpack(head)
                end = at + length
                while at < end:
                    at += os.sendfile(connection.fileno(), fd, at, end - at)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def least_serve(path: str, host: str, port: str, seal: str = "") -> None:
    """Send the messages of a range as they are asked for."""
    if not seal:
        raw_serve(path, host, port)
    listener = socket.create_server((host, int(port)), backlog=128)
    fd = os.open(path, os.O_RDONLY)
    print("ready", flush=True)

    def answer(connection: socket.socket) -> None:
        plain, sealed = bytearray(MESSAGE_BYTES), bytearray(MESSAGE_BYTES + SEAL_BYTES)
        with connection:
            while len(head := connection.recv(_RANGE.size, socket.MSG_WAITALL)) == _RANGE.size:
                at, length = _RANGE.unpack(head)
                for start, size in _messages(at, at + length, MESSAGE_BYTES):
                    os.preadv(fd, [memoryview(plain)[:size]], start)
                    message = memoryview(sealed)[: size + SEAL_BYTES]
                    KEY.encrypt_into(NONCE, memoryview(plain)[:size], None, message)
                    connection.sendall(message)

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def least_pull(url: str, size: str, streams: str, seal: str = "") -> None:
    """Receive and digest all messages over so many connections."""
    host, _, port = url.rpartition(":")
    num = int(streams)
    before = _now()

    def receive(i: int) -> None:
        start, end = int(size) * i // num, int(size) * (i + 1) // num
        extra, most = (SEAL_BYTES, MESSAGE_BYTES) if seal else (0, CHUNK_BYTES)
        message, plain = bytearray(most + extra), bytearray(most)
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(_RANGE.pack(start, end - start))
            for _, length in _messages(start, end, most):
                with memoryview(message)[: length + extra] as view:
                    if sock.recv_into(view, 0, socket.MSG_WAITALL) != len(view):
                        raise ConnectionError("the connection ended early")
                    if seal:
                        KEY.decrypt_into(NONCE, view, None, memoryview(plain)[:length])
                    blake3(memoryview(plain)[:length] if seal else view).digest()

    _side_by_side(receive, num)
    _say(before, int(size))


def _side_by_side(receive: Callable[[int], None], num: int) -> None:
    threads = [threading.Thread(target=receive, args=(i,)) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _messages(start: int, end: int, most: int) -> list[tuple[int, int]]:
    return [(at, min(most, end - at)) for at in range(start, end, most)]


def raw_pull(url: str, path: str, size: str, streams: str) -> None:
    """Receive a file over so many connections, each an equal part of it."""
    host, _, port = url.rpartition(":")
    num = int(streams)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), int(size)) as pages:
        pages.madvise(mmap.MADV_WILLNEED)
        view = memoryview(pages)
        for at in range(0, len(view), 4096):
            view[at] = 0  # every page is there before the clock starts
        before = _now()

        def receive(i: int) -> None:
            start, end = int(size) * i // num, int(size) * (i + 1) // num
            with socket.create_connection((host, int(port))) as sock, view[start:end] as part:
                sock.sendall(_RANGE.pack(start, end - start))
                at = 0
                while at < len(part):
                    with part[at:] as rest:
                        at += sock.recv_into(rest)

        _side_by_side(receive, num)
        _say(before, int(size))
        view.release()


def pull(text: str, gate: str = "") -> None:
    """Pull a version as an agent's child does; "http://" is understood too, for this measurement only.

    With a gate it says "ready" and waits for a line: several begin at once, whenever each of them started.
    """
    request = msgspec.json.decode(text, type=PullRequest)
    if gate:
        print("ready", flush=True)
        sys.stdin.readline()
    before = _now()
    if request.url.startswith("http://"):
        with mock.patch.object(pulling, "open_source", _open_plain):
            pulled = pulling.pull(request, PullProgress())
    else:
        pulled = pulling.pull(request, PullProgress())
    _say(before, pulled.pulled_bytes, sources=pulled.sources, complaints=pulled.complaints)


class _PlainStream(RangeStream):
    def _connect(self) -> socket.socket:
        return socket.create_connection((self._source.host, self._source.port), self._source.idle_s)


class _PlainSource(WeightSource):
    def stream(self) -> RangeStream:
        return _PlainStream(self)


def _open_plain(
    holder: PullSource, version: int, token: str, idle_s: float, receiver: str = ""
) -> WeightSource:
    url = holder.url.replace("http://", "https://")
    return _PlainSource(url, version, token, holder.certificate, idle_s, receiver)


def _now() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime


def _say(before: tuple[float, float], num_bytes: int, **more: object) -> None:
    wall, cpu = _now()
    found = {"seconds": wall - before[0], "cpu_s": cpu - before[1], "bytes": num_bytes}
    print(json.dumps(found | more), flush=True)


if __name__ == "__main__":
    sides: dict[str, Callable[..., None]] = {
        "serve": serve,
        "raw-serve": raw_serve,
        "raw-pull": raw_pull,
        "pull": pull,
        "least-serve": least_serve,
        "least-pull": least_pull,
    }
    sides[sys.argv[1]](*sys.argv[2:])
