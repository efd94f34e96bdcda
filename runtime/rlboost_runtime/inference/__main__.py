"""`python -m rlboost_runtime.inference RUN_FOLDER`: the endpoint of one run, for its clients and for the
environments of its episodes, from a process of its own.

The port stays the same over restarts. Exit codes: 0 after SIGTERM or SIGINT and once the run is over, 1 for
another problem, 2 on wrong arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rlboost_runtime.errors import RLBoostError, port_taken
from rlboost_runtime.inference.episode_app import make_episode_app
from rlboost_runtime.inference.episodes import SOCKET_NAME, Episodes
from rlboost_runtime.inference.fleet import Fleet
from rlboost_runtime.inference.model import EndpointModel, load_model
from rlboost_runtime.inference.server import Keys, make_app
from rlboost_runtime.inference.service import Service
from rlboost_runtime.job import Job
from rlboost_runtime.logs import event, explain, setup
from rlboost_runtime.protocol.session import RunIsOver
from rlboost_runtime.protocol.transport import connect, listening_socket
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import LOOPBACK, endpoint, listen_host, read_address
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.run.security import read_token
from rlboost_runtime.seams import SystemClock, Transport

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
MAX_EPISODE_REQUESTS = 65_536
"""More than episodes make at once: the trainer bounds them."""
UNREAD_MS = 60_000
"""How long a client may take nothing of what is sent to it until its connection is cut."""
CLOSE_S = 2.0
"""Time for open streams to say how they end."""
KEPT_S = 75
"""How long an idle connection is kept: an agent comes back once its environment is done, and a new connection
costs a TLS handshake."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def bind(run: RunFolder, port: int) -> socket.socket:
    """Return a listening socket: on `port`; if that is 0, on that of the last start. Raises `PortTaken`."""
    address, wanted = read_address(run), port or _former_port(run.api_endpoint)
    try:
        listener = _listener(listen_host(address), wanted)
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:
            raise
        raise port_taken(wanted, "endpoint", run.name) from problem
    write_json(run.api_endpoint, endpoint(listener.getsockname()[1], address))
    return listener


def _former_port(endpoint_file: Path) -> int:
    """Return the port of the last start; 0: there was none."""
    known = read_json(endpoint_file)
    return 0 if known is None else int(str(known["url"]).rsplit(":", 1)[1])


def _listener(host: str, port: int) -> socket.socket:
    listener = listening_socket(host, port)
    _cut_the_unreachable(listener)
    return listener


def _cut_the_unreachable(listener: socket.socket) -> None:
    """Have the kernel end accepted connections whose client is gone or does not read: their responses are
    freed then. Buffers are bounded anyway: an answer waits until its last part was taken."""
    if not sys.platform.startswith("linux"):
        return
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, UNREAD_MS),
    ):  # fmt: skip
        listener.setsockopt(socket.IPPROTO_TCP, option, value)


def bind_unix(run: RunFolder) -> socket.socket:
    """Return a listening socket in the run's folder, reached through an open folder: a path to a socket may
    have some hundred characters only."""
    run.sockets.mkdir(mode=0o700, exist_ok=True)
    path = run.sockets / SOCKET_NAME
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(run.sockets, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{SOCKET_NAME}")
    finally:
        os.close(folder)
    listener.listen(1024)
    return listener


def bind_loopback(run: RunFolder) -> socket.socket:
    """Return a listening socket for programs on the head: on the port of the last start, if that is free."""
    try:
        listener = _listener(LOOPBACK, _former_port(run.episodes_endpoint))
    except OSError:
        listener = _listener(LOOPBACK, 0)
    write_json(run.episodes_endpoint, {"url": f"http://{LOOPBACK}:{listener.getsockname()[1]}"})
    return listener


def _load(run: RunFolder, job: Job) -> EndpointModel:
    """Return what is served. What is there from then on, 400 MB with the tokenizer's library, is not looked
    through for garbage again: that stopped all streams for 50 ms."""
    model = load_model(run, job)
    gc.collect()
    gc.freeze()
    return model


async def serve(run: RunFolder, job: Job) -> None:
    """Serve until SIGTERM or the run's end. Raises `RLBoostError`."""
    token, certificate = read_token(run), run.certificate.read_text()

    async def dial() -> Transport:
        known = read_json(run.endpoint)
        if known is None:
            raise ConnectionError("the coordinator does not listen yet")
        return await connect(f"{known['url']}/v1/requests", token, certificate, timeout_s=DIAL_TIMEOUT_S)

    fleet = Fleet(run.name, dial, SystemClock())
    load = functools.cache(partial(_load, run, job))
    leave = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, leave.set)
    with contextlib.ExitStack() as listeners:
        servers: list[tuple[_Server, list[socket.socket]]] = []
        if job.endpoint is not None:
            listener = listeners.enter_context(bind(run, job.endpoint.port))
            event(log, "endpoint.started", port=listener.getsockname()[1])
            app = make_app(Service(fleet, load, job.endpoint.max_requests), Keys(run.api_keys))
            servers.append((_Server(_config(app, run.key, run.certificate)), [listener]))
        if job.episodes is not None:
            service = Service(fleet, load, MAX_EPISODE_REQUESTS)
            app = make_episode_app(service, Episodes(), token, job.algorithm.max_response_tokens)
            opened = [listeners.enter_context(bind_unix(run))]
            if job.episodes.command is not None:
                opened.append(listeners.enter_context(bind_loopback(run)))
            event(log, "episodes.started")
            servers.append((_Server(_config(app)), opened))
        linked, asked = asyncio.create_task(fleet.run()), asyncio.create_task(leave.wait())
        serving = [asyncio.create_task(server.serve(sockets=sockets)) for server, sockets in servers]
        await asyncio.wait({*serving, linked, asked}, return_when=asyncio.FIRST_COMPLETED)
        fleet.fail_all("the run has ended" if linked.done() else "the endpoint is shut down")
        await asyncio.sleep(0)
        for server, _ in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
        for task in (linked, asked):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, RunIsOver):
            await linked


def _config(app: FastAPI, key: Path | None = None, certificate: Path | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app, loop="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=KEPT_S,
        ssl_keyfile=key, ssl_certfile=certificate, timeout_graceful_shutdown=int(CLOSE_S),
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Serve; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_runtime.inference RUN_FOLDER", file=sys.stderr)
        return 2
    setup("endpoint")
    run = RunFolder(Path(arguments[0]).absolute())
    try:
        asyncio.run(serve(run, read_resolved(run.job_json)))
    except RLBoostError as problem:
        explain(log, problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
