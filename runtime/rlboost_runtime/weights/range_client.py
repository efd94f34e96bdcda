"""Byte ranges of a weight version's files over one keep-alive TLS connection per stream.

Guarantees: every wait has a deadline; nothing is read from a server that does not hold the run's certificate;
an answer other than exactly the range asked for never reaches the caller.

Failures come in four kinds: `Unusable` may pass, ask again; `Damaged` means that the server's file is not
the manifest's; `Absent` that there is no such version there; another `RLBoostError` is final.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from rlboost_runtime import security
from rlboost_runtime.errors import ProtocolError, RuntimeFault

LEFT_HEADER = "X-RLBoost-Left"
"""Bytes that the receiver still needs before it can serve; sent only by one that serves nothing meanwhile."""

RECEIVER_HEADER = "X-RLBoost-Receiver"
"""Who pulls: receivers behind one address have a share each."""

Fill = Callable[[memoryview], None]
"""Fills the whole view with the next bytes of the answer."""


class Unusable(Exception):
    """No good answer this time: a busy server, a broken connection, silence."""


class Damaged(Exception):
    """The server's file has not the size that the manifest says."""


class Absent(RuntimeFault):
    """The server does not have the version."""


MAX_MARKS = 16 * 1024 * 1024
"""Chunks of a version that a peer can tell of: 64 TB in chunks of 4 MiB."""


class WeightSource:
    """Where one version is served. May be shared by threads; each takes a `stream` of its own.

    `url`: of the weight server, such as https://10.0.0.1:8443; `idle_s`: longest wait for a byte;
    `receiver`: who pulls; `connect_s`: longest wait for a connection, None: as for a byte.
    Raises `ProtocolError` on an unusable URL or certificate.
    """

    def __init__(
        self,
        url: str,
        version: int,
        token: str,
        certificate_pem: str,
        idle_s: float,
        receiver: str = "",
        connect_s: float | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.hostname is None:
            raise ProtocolError(f"cannot pull from {url!r}", "give a URL such as https://HOST:PORT")
        self.host, self.port = parts.hostname, parts.port or 443
        self.folder = f"{parts.path.rstrip('/')}/v1/weights/{version}"
        self.version = version
        self.headers = {"Authorization": f"Bearer {token}"}
        if receiver:
            self.headers[RECEIVER_HEADER] = receiver
        self.left_bytes: int | None = None
        """What is still to pull, which the server may go by; None: it is not told."""
        self.tls = security.client_context(certificate_pem)
        self.idle_s = idle_s
        self.connect_s = idle_s if connect_s is None else min(idle_s, connect_s)

    def stream(self) -> RangeStream:
        """Return a new stream; it connects when first used."""
        return RangeStream(self)


class RangeStream:
    """One connection, kept alive between requests and opened anew after a failure. For one thread."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._connection: http.client.HTTPSConnection | None = None
        self._aborted = False

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file of at most `max_bytes`."""
        with self._get(name, {}) as response:
            _refuse(self._source.version, response.status, good=200)
            data = response.read(max_bytes + 1)
            if len(data) > max_bytes:
                raise ProtocolError(f"{name} is larger than {max_bytes} bytes", "publish the version again")
            if response.length:  # http.client accepts a body cut short here
                raise Unusable(f"{name} ended {response.length} bytes early")
            return data

    @contextmanager
    def open_range(self, name: str, start: int, end: int, size: int) -> Iterator[Fill]:
        """Request bytes [start, end) of a file of `size` bytes; yield what reads them."""
        with self._get(name, {"Range": f"bytes={start}-{end - 1}"}) as response:
            if response.status in (200, 416):
                raise Damaged(f"{name}: HTTP {response.status} for bytes {start}-{end - 1} of {size}")
            _refuse(self._source.version, response.status, good=206)
            given = response.getheader("Content-Range", "")
            if given != f"bytes {start}-{end - 1}/{size}":
                raise Damaged(f"{name}: got {given!r} for bytes {start}-{end - 1} of {size}")

            def fill(view: memoryview) -> None:
                while view:
                    count = response.readinto(view)
                    if count == 0:
                        raise Unusable(f"{name}: the connection ended early")
                    view = view[count:]

            yield fill

    def read_marks(self) -> bytes:
        """Return which chunks of the version the server has, a byte for each."""
        return self.read_file("have", MAX_MARKS)

    def abort(self) -> None:
        """Make a thread that waits on this stream fail now. The only method for other threads."""
        self._aborted = True  # one that is still connecting sees it then
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket's own would change its state

    def close(self) -> None:
        """Close; idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _get(self, name: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        reusable = False
        try:
            connection = self._connection = self._connection or self._connect()
            if self._aborted:
                raise Unusable("nobody needs it any more")
            connection.request("GET", f"{self._source.folder}/{name}", headers=self._headers() | headers)
            response = connection.getresponse()
            yield response
            reusable = response.isclosed()  # read to its end
        except ssl.SSLCertVerificationError as exc:
            raise ProtocolError(
                f"the weight server shows another certificate than the run's ({exc.verify_message})",
                "check that the address belongs to this run's head",
            ) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise Unusable(f"{type(exc).__name__}: {exc}") from exc
        finally:
            if not reusable:  # the rest of this answer must not be taken for the next one
                self.close()

    def _headers(self) -> dict[str, str]:
        left = self._source.left_bytes
        return self._source.headers | ({} if left is None else {LEFT_HEADER: str(left)})

    def _connect(self) -> http.client.HTTPSConnection:
        source = self._source
        connection = http.client.HTTPSConnection(
            source.host, source.port, timeout=source.connect_s, context=source.tls
        )
        connection.connect()
        connection.sock.settimeout(source.idle_s)
        return connection


def _refuse(version: int, status: int, *, good: int) -> None:
    """Raise what the status means unless it is the good one."""
    if status == good:
        return
    if status in (401, 403):
        raise ProtocolError(
            f"the weight server refused our token (HTTP {status})",
            "use the token and address of the same run",
        )
    if status == 404:
        raise Absent(
            f"the weight server does not have version {version}, or not any more", "pull the newest version"
        )
    raise Unusable(f"HTTP {status}")
