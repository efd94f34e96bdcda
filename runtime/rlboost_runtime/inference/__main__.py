"""`python -m rlboost_runtime.inference RUN_FOLDER`: the endpoint of one run, from a process of its own.

The port stays the same over restarts. Exit codes: 0 after SIGTERM or SIGINT and once the run is over, 1 for
another problem, 2 on wrong arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvicorn

from rlboost_runtime.errors import RLBoostError, port_taken
from rlboost_runtime.inference.fleet import Fleet
from rlboost_runtime.inference.model import load_model
from rlboost_runtime.inference.server import Keys, make_app
from rlboost_runtime.inference.service import Service
from rlboost_runtime.job import Endpoint
from rlboost_runtime.logs import event, explain, setup
from rlboost_runtime.protocol.session import RunIsOver
from rlboost_runtime.protocol.transport import connect
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import endpoint, listen_host, read_address
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.run.security import read_token
from rlboost_runtime.seams import SystemClock, Transport

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
CLOSE_S = 2.0
"""Time for open streams to say how they end."""


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def bind(run: RunFolder, port: int) -> socket.socket:
    """Return a listening socket: on `port`; if that is 0, on that of the last start. Raises `PortTaken`."""
    known, address = read_json(run.api_endpoint), read_address(run)
    wanted = port if known is None or port else int(str(known["url"]).rsplit(":", 1)[1])
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen_host(address), wanted))
    except OSError as problem:
        listener.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        raise port_taken(wanted, "endpoint", run.name) from problem
    listener.listen(1024)
    write_json(run.api_endpoint, endpoint(listener.getsockname()[1], address))
    return listener


async def serve(run: RunFolder, settings: Endpoint) -> None:
    """Serve until SIGTERM or the run's end. Raises `RLBoostError`."""
    job, token, certificate = read_resolved(run.job_json), read_token(run), run.certificate.read_text()

    async def dial() -> Transport:
        known = read_json(run.endpoint)
        if known is None:
            raise ConnectionError("the coordinator does not listen yet")
        return await connect(f"{known['url']}/v1/requests", token, certificate, timeout_s=DIAL_TIMEOUT_S)

    fleet = Fleet(run.name, dial, SystemClock())
    service = Service(fleet, partial(load_model, run, job), settings.max_requests)
    config = uvicorn.Config(
        make_app(service, Keys(run.api_keys)), loop="none", lifespan="off", log_config=None, access_log=False,
        ssl_keyfile=run.key, ssl_certfile=run.certificate, timeout_graceful_shutdown=int(CLOSE_S),
    )  # fmt: skip
    server, leave = _Server(config), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, leave.set)
    with bind(run, settings.port) as listener:
        event(log, "endpoint.started", port=listener.getsockname()[1])
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        linked, asked = asyncio.create_task(fleet.run()), asyncio.create_task(leave.wait())
        await asyncio.wait({serving, linked, asked}, return_when=asyncio.FIRST_COMPLETED)
        fleet.fail_all("the run has ended" if linked.done() else "the endpoint is shut down")
        await asyncio.sleep(0)
        server.should_exit = True
        await serving
        for task in (linked, asked):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, RunIsOver):
            await linked


def main(arguments: list[str]) -> int:
    """Serve; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_runtime.inference RUN_FOLDER", file=sys.stderr)
        return 2
    setup("endpoint")
    run = RunFolder(Path(arguments[0]).absolute())
    try:
        asyncio.run(serve(run, read_resolved(run.job_json).endpoint or Endpoint()))
    except RLBoostError as problem:
        explain(log, problem)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
