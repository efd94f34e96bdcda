"""One side of a transfer, as a process of its own, possibly in a network namespace.

    python -m benchmarks.weights.side serve STORE HOST PORT [TLS_FOLDER]     our server python -m
    benchmarks.weights.side raw-serve FILE HOST PORT               sendfile of asked ranges, no HTTP python -m
    benchmarks.weights.side raw-pull URL FILE SIZE STREAMS         recv_into a mapped, prefaulted file python
    -m benchmarks.weights.side pull JSON                              our puller, a `PullRequest`

Servers say "ready" once they listen. Pulls print one JSON line: seconds, CPU-seconds of this process, bytes.
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

from rlboost_runtime import security
from rlboost_runtime.run_folder import RunFolder
from rlboost_runtime.weights import pull as pulling
from rlboost_runtime.weights.catalog import StoreCatalog
from rlboost_runtime.weights.holders import Holder
from rlboost_runtime.weights.range_client import RangeStream, WeightSource
from rlboost_runtime.weights.serving import WeightHttpServer
from rlboost_runtime.weights.store import WeightStore
from rlboost_runtime.weights.work import Progress

TOKEN = "bench"
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

        threads = [threading.Thread(target=receive, args=(i,)) for i in range(num)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _say(before, int(size))
        view.release()


def pull(text: str) -> None:
    """Pull a version as an agent's child does; "http://" is understood too, for this measurement only."""
    request = msgspec.json.decode(text, type=pulling.PullRequest)
    before = _now()
    if request.url.startswith("http://"):
        with mock.patch.object(pulling, "open_source", _open_plain):
            pulled = pulling.pull(request, Progress())
    else:
        pulled = pulling.pull(request, Progress())
    _say(before, pulled.pulled_bytes, by_holder=pulled.by_holder, complaints=pulled.complaints)


class _PlainStream(RangeStream):
    def _connect(self) -> socket.socket:
        return socket.create_connection((self._source.host, self._source.port), self._source.idle_s)


class _PlainSource(WeightSource):
    def stream(self) -> RangeStream:
        return _PlainStream(self)


def _open_plain(holder: Holder, version: int, token: str, idle_s: float, receiver: str = "") -> WeightSource:
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
    }
    sides[sys.argv[1]](*sys.argv[2:])
