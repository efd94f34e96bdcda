"""`python -m rlboost_cli.dashboard RUN_FOLDER`: the page of one run, served by a process of its head.

Port and key stay the same over restarts, so that an open page goes on. A port that is taken is tried again:
nothing of the run needs this process.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from rlboost_cli.dashboard.server import DashboardServer
from rlboost_runtime.job import Dashboard
from rlboost_runtime.logs import event, setup
from rlboost_runtime.run.credentials import make_viewer_key
from rlboost_runtime.run.folder import RunFolder, read_json, write_json
from rlboost_runtime.run.head import LOOPBACK, read_address
from rlboost_runtime.run.resolved import read_resolved
from rlboost_runtime.run.security import read_token, server_context

log = logging.getLogger(__name__)

RETRY_S = 10.0


def start(run: RunFolder, settings: Dashboard) -> DashboardServer:
    """Return the server, and write its address; on port 0 it is that of the last start. Raises `OSError`."""
    known = read_json(run.dashboard)
    port = settings.port or (int(str(known["url"]).rsplit(":", 1)[1]) if known else 0)
    tls = None if _is_loopback(settings.host) else server_context(run)
    server = DashboardServer(
        settings.host, port, key=make_viewer_key(read_token(run)), only=run.name, tls=tls
    )
    write_json(run.dashboard, {"url": _address(run, settings.host, server)})
    return server


def _address(run: RunFolder, host: str, server: DashboardServer) -> str:
    """Return where others find the page: where every address is listened on, at the head's public one."""
    scheme, _, rest = server.url().partition("/?")[0].partition("://")
    public = read_address(run)
    if host in ("0.0.0.0", "::"):  # noqa: S104 - asked for by the job
        rest = f"{LOOPBACK if public is None else public.host}:{server.server_port}"
    return f"{scheme}://{rest}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _leave(signum: int, frame: FrameType | None) -> None:
    sys.exit(0)


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m rlboost_cli.dashboard RUN_FOLDER", file=sys.stderr)
        return 2
    setup("dashboard")
    signal.signal(signal.SIGTERM, _leave)
    run = RunFolder(Path(arguments[0]).absolute())
    settings = read_resolved(run.job_json).dashboard or Dashboard()
    while True:
        try:
            server = start(run, settings)
        except OSError as problem:
            event(
                log, "dashboard.not_started", level=logging.WARNING, host=settings.host, port=settings.port,
                problem=str(problem),
            )  # fmt: skip
            time.sleep(RETRY_S)
            continue
        with server:
            server.serve_forever()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
