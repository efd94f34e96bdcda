"""The agent's two weight children: one pulls versions, one serves them to other instances of the zone.

They are processes of their own, so that neither TLS nor hashing delays a heartbeat. They end with their
standard input, hence with us; the token and the certificate travel on that input only. Nothing depends on the
peer server: where it cannot start, or nobody can reach it, this instance only pulls.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import LoadVersionMessage, PeerListening
from rlboost_runtime.run import in_memory
from rlboost_runtime.seams import Backoff
from rlboost_runtime.weights.child_pipe import (
    ChildFailure,
    PeerRequest,
    PullProgress,
    PullReport,
    PullRequest,
    PullSource,
    SourceKind,
)

log = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 30.0
"""A pull whose verified bytes do not grow for so long is started over; what is verified is kept on disk."""
ATTEMPTS = 5
"""Failed attempts after which the pull fails; the coordinator asks again, or for something newer."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
MIN_MEASURED_BYTES = 8 * 1024 * 1024
"""A smaller pull measures how long an answer takes, not the rate of the link."""
PEER_START_TIMEOUT_S = 30.0
PEER_PAUSE_S = 10.0
"""Before a peer server that ended is started again."""
PULL_COMMAND = (sys.executable, "-m", "rlboost_runtime.weights.pull.child")
PEER_COMMAND = (sys.executable, "-m", "rlboost_runtime.weights.serve.peer")

_pull_decoder: msgspec.json.Decoder[PullProgress | PullReport | ChildFailure] = msgspec.json.Decoder(
    PullProgress | PullReport | ChildFailure
)
_peer_decoder: msgspec.json.Decoder[PeerListening | ChildFailure] = msgspec.json.Decoder(
    PeerListening | ChildFailure
)


class PullFailed(RuntimeFault):
    """The version could not be fetched, several times over."""


@asynccontextmanager
async def _child(
    command: tuple[str, ...], log_path: Path, request: PullRequest | PeerRequest
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Start a child with `request` on its stdin; yield it and its stdout; kill it if it still runs then."""
    with log_path.open("ab") as log_file:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log_file,
            start_new_session=True,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(request) + b"\n")
        yield child, child.stdout
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


class Puller:
    """Pulls one version at a time; cancelling a pull ends its child.

    `template`: what all requests have in common; its `extra_sources` may have any version.
    """

    def __init__(
        self, template: PullRequest, log_path: Path, command: tuple[str, ...] = PULL_COMMAND
    ) -> None:
        self._template = template
        self._log_path = log_path
        self._command = command
        self.weights_url = ""
        """Base URL of the weight server, as the coordinator last gave it."""
        self._order = LoadVersionMessage(-1)
        self._serves = False
        self._bytes_per_s = template.bytes_per_s
        self.progress: tuple[int, int, int] | None = None
        """The version that is being fetched, its bytes that are here, and all of them."""

    def note_order(self, order: LoadVersionMessage, *, serves: bool) -> None:
        """Note which peers may have a version, and whether the engine serves an older one meanwhile."""
        self._order, self._serves = order, serves

    async def pull(self, version: int) -> PullReport:
        """Fetch `version`. Raises `PullFailed` after several attempts."""
        problem, backoff = "", Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            for _ in range(ATTEMPTS):
                try:
                    return await self._attempt(version)
                except (RuntimeFault, TimeoutError, OSError, ValueError) as exc:
                    problem = str(exc) or "no progress"
                    event(log, "pull.failed", level=logging.WARNING, version=version, problem=problem)
                await asyncio.sleep(backoff.next_s())
        finally:
            self.progress = None
        raise PullFailed(f"version {version} cannot be pulled: {problem}", f"see {self._log_path}")

    async def _attempt(self, version: int) -> PullReport:
        best = -1
        loop = asyncio.get_running_loop()
        async with (
            _child(self._command, self._log_path, self._request(version)) as (_, stdout),
            asyncio.timeout(PROGRESS_TIMEOUT_S) as quiet,
        ):
            while line := await stdout.readline():
                match _pull_decoder.decode(line):
                    case PullReport() as report:
                        in_memory.hold(Path(self._template.folder))  # the child's hold ends with it
                        self._note_report(report)
                        return report
                    case ChildFailure(problem=problem):
                        raise RuntimeFault(problem, f"see {self._log_path}")
                    case PullProgress(done_bytes, total_bytes, moved_bytes):
                        self.progress = (version, done_bytes, total_bytes)
                        if max(done_bytes, moved_bytes) > best:
                            best = max(done_bytes, moved_bytes)
                            quiet.reschedule(loop.time() + PROGRESS_TIMEOUT_S)
        raise RuntimeFault("the puller ended without a report", f"see {self._log_path}")

    def _request(self, version: int) -> PullRequest:
        request = msgspec.structs.replace(
            self._template,
            url=self.weights_url,
            version=version,
            serves=self._serves,
            bytes_per_s=self._bytes_per_s,
        )
        order = self._order
        if order.version != version:
            return request
        peers = (
            PullSource(p.instance, SourceKind.PEER, p.url, p.certificate, token=p.token) for p in order.peers
        )
        return msgspec.structs.replace(
            request, digest=order.digest, part=order.part, extra_sources=(*peers, *request.extra_sources)
        )

    def _note_report(self, report: PullReport) -> None:
        """Measure the link, and log what went wrong in a pull that succeeded."""
        if report.pulled_bytes >= MIN_MEASURED_BYTES and report.fetch_s:
            self._bytes_per_s = round(report.pulled_bytes / report.fetch_s)
        version = report.version
        if report.num_corrupt:
            event(
                log, "pull.chunks_corrupt", level=logging.WARNING,
                version=version, num_chunks=report.num_corrupt,
            )  # fmt: skip
        for source, problem in report.complaints.items():
            event(
                log, "pull.source_left_out", level=logging.WARNING,
                version=version, source=source, problem=problem,
            )  # fmt: skip


class PeerServer:
    """Serves what lies in `folder`; `head_url` decides which of our addresses the zone is given."""

    def __init__(self, folder: Path, head_url: str, log_path: Path) -> None:
        self._folder = folder
        self._token = secrets.token_urlsafe(32)
        self._head_url = head_url
        self._log_path = log_path

    async def keep(self) -> AsyncIterator[PeerListening]:
        """Keep the child alive; yield where it listens, anew after each start. Never ends."""
        while True:
            try:
                request = PeerRequest(str(self._folder), self._token, own_address(self._head_url))
                async with _child(PEER_COMMAND, self._log_path, request) as (child, stdout):
                    yield await self._listening(stdout)
                    await child.wait()
            except (OSError, TimeoutError, ValueError) as exc:
                event(log, "peer.failed", level=logging.WARNING, problem=str(exc) or "it did not start")
            await asyncio.sleep(PEER_PAUSE_S)

    async def _listening(self, stdout: asyncio.StreamReader) -> PeerListening:
        async with asyncio.timeout(PEER_START_TIMEOUT_S):
            line = await stdout.readline()
        answer = _peer_decoder.decode(line) if line else ChildFailure("it ended without an answer")
        if isinstance(answer, ChildFailure):
            raise ValueError(answer.problem)
        event(log, "peer.listening", url=answer.url)
        return answer


def own_address(head_url: str) -> str:
    """Return the address of this machine on the way to the head: the one that its network gave it.

    Behind NAT that is a private one, which is what neighbours see.
    """
    parts = urlsplit(head_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 443))  # sends nothing
        return str(probe.getsockname()[0])
