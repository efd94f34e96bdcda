"""Lets other instances of the zone pull from this machine: keeps the child process that serves them.

The child ends with its standard input, hence with us. Nothing depends on it: where it cannot start, or nobody
can reach it, this instance only pulls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import PeerListening

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "rlboost_runtime.weights.serve.peer")
START_TIMEOUT_S = 30.0
PAUSE_S = 10.0
"""Before a child that ended is started again."""


class _Line(msgspec.Struct):
    url: str = ""
    certificate: str = ""
    error: str = ""


class PeerServer:
    """Serves what lies in `folder`; `head_url` says which of our addresses the zone sees."""

    def __init__(self, folder: Path, token: str, head_url: str, log_path: Path) -> None:
        self._folder = folder
        self._token = token
        self._head_url = head_url
        self._log_path = log_path

    async def keep(self) -> AsyncIterator[PeerListening]:
        """Keep the child alive; yield where it listens, anew after each start. Ends never."""
        while True:
            try:
                async with self._child() as child:
                    yield await self._listening(child)
                    await child.wait()
            except (OSError, TimeoutError, ValueError) as exc:
                event(log, "peer.failed", level=logging.WARNING, problem=str(exc) or "it did not start")
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncIterator[asyncio.subprocess.Process]:
        with self._log_path.open("ab") as log_file:
            child = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,
            )
        try:
            yield child
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def _listening(self, child: asyncio.subprocess.Process) -> PeerListening:
        assert child.stdin is not None
        assert child.stdout is not None
        request = {"folder": str(self._folder), "token": self._token, "host": own_address(self._head_url)}
        child.stdin.write(msgspec.json.encode(request) + b"\n")
        async with asyncio.timeout(START_TIMEOUT_S):
            line = msgspec.json.decode(await child.stdout.readline(), type=_Line)
        if not line.url:
            raise ValueError(line.error or "it ended without a word")
        event(log, "peer.listening", url=line.url)
        return PeerListening(line.url, line.certificate)


def own_address(head_url: str) -> str:
    """Return the address of this machine on the way to the head: the one that its network gave it.

    Behind NAT that is a private one, which is what neighbours see.
    """
    parts = urlsplit(head_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 443))  # sends nothing
        return str(probe.getsockname()[0])
