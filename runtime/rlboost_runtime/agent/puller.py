"""Pulls weight versions through a child process, so that neither TLS nor hashing delays a heartbeat.

The child ends with its standard input, hence with us. Its token and certificate travel on that input only.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import LoadVersionMessage
from rlboost_runtime.seams import Backoff

log = logging.getLogger(__name__)

PROGRESS_TIMEOUT_S = 30.0
"""A pull whose verified bytes do not grow for so long is started over; what is verified is kept on disk."""
ATTEMPTS = 5
"""Failed attempts after which the coordinator is told; it asks again, or for something newer."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
KEEP_VERSIONS = 2
COMMAND = (sys.executable, "-m", "rlboost_runtime.weights.pull.child")


class PullFailed(RuntimeFault):
    """The version could not be fetched, several times over."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A complete, verified version on this machine."""

    version: int
    folder: Path
    num_bytes: int
    seconds: float
    how: str = ""
    full_bytes: int = 0
    by_holder: dict[str, int] = field(default_factory=dict)
    complaints: dict[str, str] = field(default_factory=dict)


MIN_MEASURED_BYTES = 8 * 1024 * 1024
"""A pull of fewer bytes tells how long an answer takes, not what the link carries."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Where and how to pull. `folder` receives a sub-folder per version; see `weights.pull.PullRequest`."""

    folder: Path
    token: str
    certificate: str
    streams: int
    receiver: str = ""
    store: str = ""
    siblings: tuple[str, ...] = ()
    bucket: str = ""
    transfer: str = "auto"
    usd_per_gb: float = 0.0
    usd_per_hour: float = 0.0


class _Line(msgspec.Struct):
    """Any line of the child."""

    bytes: int = 0
    total: int = 0
    moved: int = 0
    done: bool = False
    folder: str = ""
    pulled_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    how: str = ""
    full_bytes: int = 0
    bytes_per_s: float = 0.0
    by_holder: dict[str, int] = {}
    complaints: dict[str, str] = {}
    num_corrupt: int = 0


class Puller:
    """Pulls one version at a time; cancelling a pull ends its child."""

    def __init__(self, source: PullSettings, log_path: Path, command: tuple[str, ...] = COMMAND) -> None:
        self._source = source
        self._log_path = log_path
        self._command = command
        self.weights_url = ""
        """Base URL of the weight server, as the coordinator said last."""
        self._order = LoadVersionMessage(-1)
        self._serves = False
        self._bytes_per_s = 0.0  # of the last pull
        self.progress: tuple[int, int, int] | None = None
        """The version that is being fetched, its bytes that are here, and all of them."""

    def learn(self, order: LoadVersionMessage, *, serves: bool) -> None:
        """Note who has a version, and whether the engine serves an older one meanwhile."""
        self._order, self._serves = order, serves

    async def pull(self, version: int) -> Pulled:
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

    async def _attempt(self, version: int) -> Pulled:
        with self._log_path.open("ab") as log_file:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,
            )
        try:
            return await self._follow(child, version)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def _follow(self, child: asyncio.subprocess.Process, version: int) -> Pulled:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(self._request(version))
        best = -1
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PROGRESS_TIMEOUT_S) as quiet:
            while line_bytes := await child.stdout.readline():
                line = msgspec.json.decode(line_bytes, type=_Line)
                if line.error:
                    raise RuntimeFault(line.error, f"see {self._log_path}")
                if line.done:
                    if line.pulled_bytes >= MIN_MEASURED_BYTES:
                        self._bytes_per_s = line.bytes_per_s
                    _report(version, line)
                    return Pulled(
                        version,
                        Path(line.folder),
                        line.pulled_bytes,
                        line.seconds,
                        line.how,
                        line.full_bytes,
                        line.by_holder,
                        line.complaints,
                    )
                self.progress = (version, line.bytes, line.total)
                if max(line.bytes, line.moved) > best:
                    best = max(line.bytes, line.moved)
                    quiet.reschedule(loop.time() + PROGRESS_TIMEOUT_S)
        raise RuntimeFault("the puller ended without a word", f"see {self._log_path}")

    def _request(self, version: int) -> bytes:
        source = self._source
        request: dict[str, object] = {
            "url": self.weights_url,
            "version": version,
            "folder": str(source.folder),
            "token": source.token,
            "certificate": source.certificate,
            "streams": source.streams,
            "keep": KEEP_VERSIONS,
            "receiver": source.receiver,
            "store": source.store,
            "siblings": source.siblings,
            "transfer": source.transfer,
            "usd_per_gb": source.usd_per_gb,
            "usd_per_hour": source.usd_per_hour,
            "serves": self._serves,
            "holders": self._holders(version),
        }
        if self._bytes_per_s:
            request["bytes_per_s"] = self._bytes_per_s
        if self._order.version == version:
            request |= {"digest": self._order.digest, "part": self._order.part}
        return msgspec.json.encode(request) + b"\n"

    def _holders(self, version: int) -> list[dict[str, str]]:
        """Return who else may have the version."""
        holders = []
        if self._order.version == version:
            holders += [
                {"name": peer.instance, "kind": "peer", "url": peer.url, "certificate": peer.certificate}
                for peer in self._order.peers
            ]
        if self._source.bucket:
            holders.append({"name": "bucket", "kind": "bucket", "url": self._source.bucket})
        return holders


def _report(version: int, line: _Line) -> None:
    """Say what went wrong in a pull that came to a good end."""
    if line.num_corrupt:
        event(log, "pull.chunks_corrupt", level=logging.WARNING, version=version, num_chunks=line.num_corrupt)
    for holder, problem in line.complaints.items():
        event(
            log, "pull.holder_left_out", level=logging.WARNING,
            version=version, holder=holder, problem=problem,
        )  # fmt: skip
