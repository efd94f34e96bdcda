"""A machine's peer server: hands what one of its agents pulls to other instances of the zone.

::

    python -m rlboost_runtime.weights.serve.peer

A child process of the agent: reads a `PeerRequest`, writes a `PeerListening` once it listens
(`weights.child_pipe`). It has a certificate of its own, made at its start: the run's key never leaves the
head. The coordinator passes the certificate on to those who read from it. It ends with its stdin, hence with
its agent.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from rlboost_runtime.protocol.messages import PeerListening
from rlboost_runtime.run import security
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.weights.child_pipe import ChildFailure, PeerRequest, read_line, send
from rlboost_runtime.weights.serve.catalog import PulledCatalog
from rlboost_runtime.weights.serve.http import WeightHttpServer


def main() -> int:
    """Serve until stdin ends; returns the exit code."""
    stdin = sys.stdin.fileno()
    try:
        request = msgspec.json.decode(read_line(stdin), type=PeerRequest)
        listener = socket.create_server((request.host, 0), backlog=128)
    except (msgspec.DecodeError, OSError) as exc:
        send(ChildFailure(f"cannot serve peers: {exc}"))
        return 1
    stop = threading.Event()
    with tempfile.TemporaryDirectory(prefix="rlboost-peer-") as name:
        identity = RunFolder(Path(name))
        security.create_secrets(identity)
        catalog = PulledCatalog([Path(request.folder)])
        server = WeightHttpServer(listener, security.server_context(identity), request.token, catalog)
        threading.Thread(target=_wait_for_end, args=(stdin, stop), daemon=True).start()
        port = listener.getsockname()[1]
        send(PeerListening(f"https://{request.host}:{port}", identity.certificate.read_text(), request.token))
        server.serve_until(stop)  # here: if it fails, the process ends, and the agent sees it
    return 0


def _wait_for_end(stdin: int, stop: threading.Event) -> None:
    while os.read(stdin, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
