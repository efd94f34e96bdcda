"""The weight server: hands out the run's weight versions over TLS, from a process of its own.

::

    python -m rlboost_runtime.weights.server RUN_FOLDER

    GET /v1/weights/latest            {"version"}; 404 before the first publication
    GET /v1/weights/VERSION/FILE      a file of the version's manifest or `manifest.json`; byte ranges work

Guarantees: without the run's token every answer is 401; only files that a version's manifest names are
reachable; a version that is being pulled is not deleted, nor within `LINGER_S` of its last request; the port
stays the same over restarts, so that machines find the server again.

Exit codes: 0 after SIGTERM or SIGINT, 1 where the port of the last start is taken, 2 on wrong arguments.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from rlboost_runtime import security
from rlboost_runtime.errors import ProtocolError, RLBoostError, port_taken
from rlboost_runtime.logs import event, explain, setup
from rlboost_runtime.run_folder import RunFolder, read_json, write_json
from rlboost_runtime.weights.manifest import MANIFEST, read_manifest
from rlboost_runtime.weights.store import Lease, VersionGone, WeightStore

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
LINGER_S = 15.0
"""How long a version stays held after a request: longer than a puller's pause between two range requests
(its longest backoff is 2 s), short against a step, so that old versions do not pile up."""
READ_BYTES = 1024 * 1024
"""Bytes read from disk at once: at 64 KiB the hand-over to the reading thread costs more than the reading."""
DRAIN_S = 2.0
"""Requests in flight get this long at the end; pullers resume anyway."""
UNREAD_S = 30.0
"""A receiver that takes nothing for this long is cut off: a vanished machine must not hold a version."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class _Held:
    """A version that is being read, and the file names that its manifest allows."""

    lease: Lease
    names: frozenset[str]
    num_users: int = 0
    end: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class ReadLeases:
    """Holds versions while they are requested, and for `linger_s` after. Used on one event loop."""

    store: WeightStore
    linger_s: float = LINGER_S
    _held: dict[int, _Held] = field(default_factory=dict)

    @contextmanager
    def reading(self, version: int) -> Iterator[_Held]:
        """Hold the version within the context. Raises `VersionGone`, `ProtocolError` on a broken manifest."""
        held = self._held.get(version)
        if held is None:
            held = self._held[version] = self._hold(version)
        if held.end is not None:
            held.end.cancel()
            held.end = None
        held.num_users += 1
        try:
            yield held
        finally:
            held.num_users -= 1
            if held.num_users == 0:
                loop = asyncio.get_running_loop()
                held.end = loop.call_later(self.linger_s, self._release, version)

    def close(self) -> None:
        """Let go of everything."""
        for held in self._held.values():
            if held.end is not None:
                held.end.cancel()
            held.lease.release()
        self._held.clear()

    def _hold(self, version: int) -> _Held:
        lease = self.store.read(version)
        try:
            manifest = read_manifest(lease.folder)
        except BaseException:
            lease.release()
            raise
        return _Held(lease, frozenset({MANIFEST, *(file.name for file in manifest.files)}))

    def _release(self, version: int) -> None:
        self._held.pop(version).lease.release()


class _LeasedFile(web.FileResponse):
    """A file of a version that stays held while the file is being sent (`prepare` sends it all)."""

    def __init__(self, leases: ReadLeases, version: int, path: Path) -> None:
        super().__init__(path, chunk_size=READ_BYTES)
        self._leases = leases
        self._version = version

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send."""
        with self._leases.reading(self._version):
            return await super().prepare(request)


def make_app(store: WeightStore, token: str, linger_s: float = LINGER_S) -> web.Application:
    """Return the web application."""
    leases = ReadLeases(store, linger_s)

    @web.middleware
    async def with_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not security.authorised(request.headers.get("Authorization"), token):
            return web.json_response({"error": "no or wrong token"}, status=401)
        return await handler(request)

    async def latest(request: web.Request) -> web.StreamResponse:
        version = store.latest()
        if version is None:
            return _not_found("no version is published yet")
        return web.json_response({"version": version})

    async def file(request: web.Request) -> web.StreamResponse:
        version, name = int(request.match_info["version"]), request.match_info["file"]
        try:
            with leases.reading(version) as held:
                if name not in held.names:
                    return _not_found(f"version {version} has no such file")
                return _LeasedFile(leases, version, held.lease.folder / name)
        except VersionGone:
            return _not_found(f"version {version} is not here, or not any more")
        except ProtocolError as exc:
            event(log, "weights.manifest_broken", level=logging.ERROR, version=version, problem=exc.problem)
            return web.json_response({"error": exc.problem}, status=500)

    async def close(_: web.Application) -> None:
        leases.close()

    app = web.Application(middlewares=[with_token])
    app.router.add_get("/v1/weights/latest", latest)
    app.router.add_get("/v1/weights/{version:[0-9]{1,12}}/{file}", file)
    app.on_cleanup.append(close)
    return app


async def serve(run: RunFolder, stop: asyncio.Event, linger_s: float = LINGER_S) -> None:
    """Serve the run's versions until `stop` is set. Raises `PortTaken`."""
    store = WeightStore(run.weights)
    runner = web.AppRunner(
        make_app(store, security.read_token(run), linger_s),
        access_log=None,
        shutdown_timeout=DRAIN_S,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        listener = bind(run.weights_endpoint)
        await web.SockSite(runner, listener, ssl_context=security.server_context(run)).start()
        port = listener.getsockname()[1]
        write_json(run.weights_endpoint, {"url": f"https://{HOST}:{port}"})
        event(log, "weights.server_started", port=port)
        await stop.wait()
    finally:
        await runner.cleanup()


def bind(endpoint: Path) -> socket.socket:
    """Return a socket on the port named in the endpoint file, on a free one where there is no file yet."""
    known = read_json(endpoint)
    port = 0 if known is None else urlsplit(known["url"]).port or 0
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # accepted sockets inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
        listener.bind((HOST, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        if exc.errno != errno.EADDRINUSE:
            raise
        raise port_taken(port, "weight server", endpoint.parent.name) from exc
    return listener


def run_on_uvloop(main: Coroutine[None, None, None]) -> None:
    """Run to the end. Under TLS, asyncio's own loop sends files in pieces of 16 KiB, four times as dear."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def _not_found(problem: str) -> web.Response:
    return web.json_response({"error": problem}, status=404)


async def _main(run: RunFolder) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(run, stop)


def main(arguments: list[str]) -> int:
    """Run the server; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_runtime.weights.server RUN_FOLDER", file=sys.stderr)
        return 2
    setup("weights")
    try:
        run_on_uvloop(_main(RunFolder(Path(arguments[0]).absolute())))
    except RLBoostError as exc:
        explain(log, exc)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
