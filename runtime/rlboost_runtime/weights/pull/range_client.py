"""Byte ranges of a weight version's files over one keep-alive TLS connection per stream.

Guarantees: every wait has a deadline; nothing is read from a server that does not hold the run's certificate;
an answer other than exactly the range asked for never reaches the caller.

Failures come in four kinds: `Unusable` may pass, so try again; `Damaged` means that the server's file is not
the manifest's; `Absent` that the server does not have the version; another `RLBoostError` is final.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from rlboost_runtime.errors import ProtocolError, RuntimeFault
from rlboost_runtime.run import security

LEFT_HEADER = "X-RLBoost-Left"
"""Bytes that the receiver still needs before it can serve; sent only by one that serves nothing meanwhile."""

RECEIVER_HEADER = "X-RLBoost-Receiver"
"""Who pulls: receivers behind one address have a share each."""

Fill = Callable[[memoryview], None]
"""Fills the whole view with the next bytes of the answer."""


class Unusable(Exception):
    """No good answer this time: a busy server, a broken connection, silence."""


class Damaged(Exception):
    """The server's file does not have the manifest's size."""


class Absent(RuntimeFault):
    """The server does not have the version."""


MAX_MARKS = 16 * 1024 * 1024
"""Chunks of a version that a peer can report: 64 TB in chunks of 4 MiB."""


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
        self.host, self.port, path = _split(url)
        self.folder = f"{path.rstrip('/')}/v1/weights/{version}"
        self.version = version
        self.headers = {"Authorization": f"Bearer {token}"}
        if receiver:
            self.headers[RECEIVER_HEADER] = receiver
        self.left_bytes: int | None = None
        """What is still to pull, sent to the server for its shares; None: not sent."""
        self.tls = security.client_context(certificate_pem)
        self.idle_s = idle_s
        self.connect_s = idle_s if connect_s is None else min(idle_s, connect_s)

    def stream(self) -> RangeStream:
        """Return a new stream; it connects when first used."""
        return RangeStream(self)


def _split(url: str) -> tuple[str, int, str]:
    """Return host, port and path. Raises `ProtocolError` on a URL that no server could have."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "https" and parts.hostname and url.isascii() and url.isprintable():
            parts.hostname.encode("idna")  # as `socket` will: no empty label, none that is too long
            return parts.hostname, parts.port or 443, parts.path
    except ValueError:  # a port beyond 65535, half an IPv6 address
        pass
    raise ProtocolError(f"cannot pull from {url!r}", "give a URL such as https://HOST:PORT")


class RangeStream:
    """One connection, kept alive between requests and opened anew after a failure. For one thread.

    HTTP is spoken by hand, as far as weight servers speak it: bodies go from TLS straight to where they are
    wanted. Through `http.client` a GB took a fifth more of a core.
    """

    step_bytes = 512 * 1024
    """How many bytes to read of a range at once: all that is read in one step arrives together."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._sock: socket.socket | None = None
        self._aborted = False

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """Return a whole file of at most `max_bytes`."""
        with self._get(name) as answer:
            _refuse(self._source.version, answer.status, expected=200)
            if answer.left > max_bytes:
                raise ProtocolError(f"{name} is larger than {max_bytes} bytes", "publish the version again")
            data = bytearray(answer.left)
            answer.fill(memoryview(data))
            return bytes(data)

    @contextmanager
    def open_range(self, name: str, start: int, end: int, size: int) -> Iterator[Fill]:
        """Request bytes [start, end) of a file of `size` bytes; yield what reads them."""
        with self._get(name, f"Range: bytes={start}-{end - 1}\r\n") as answer:
            if answer.status in (200, 416):
                raise Damaged(f"{name}: HTTP {answer.status} for bytes {start}-{end - 1} of {size}")
            _refuse(self._source.version, answer.status, expected=206)
            if answer.content_range != f"bytes {start}-{end - 1}/{size}" or answer.left != end - start:
                given = f"{answer.left} bytes, {answer.content_range!r}"
                raise Damaged(f"{name}: got {given} for bytes {start}-{end - 1} of {size}")
            yield answer.fill

    def read_marks(self) -> bytes:
        """Return which chunks of the version the server has, a byte for each."""
        return self.read_file("have", MAX_MARKS)

    def abort(self) -> None:
        """Make a thread that waits on this stream fail now. The only method for other threads."""
        self._aborted = True  # one that is still connecting sees it then
        sock = self._sock
        if sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket's own would change its state

    def close(self) -> None:
        """Close; idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    @contextmanager
    def _get(self, name: str, more: str = "") -> Iterator[_Answer]:
        reusable = False
        try:
            sock = self._sock
            if sock is None:
                sock = self._sock = self._connect()
            if self._aborted:
                raise Unusable("it is not needed any more")
            sock.sendall(self._request(name, more))
            answer = _read_head(sock, self._source.idle_s)
            yield answer
            reusable = answer.left == 0 and answer.keeps_open
        except ssl.SSLCertVerificationError as exc:
            raise ProtocolError(
                f"the weight server shows another certificate than the run's ({exc.verify_message})",
                "check that the address belongs to this run's head",
            ) from exc
        except OSError as exc:
            raise Unusable(f"{type(exc).__name__}: {exc}") from exc
        finally:
            if not reusable:  # the rest of this answer must not be taken for the next one
                self.close()

    def _request(self, name: str, more: str) -> bytes:
        source = self._source
        headers = "".join(f"{key}: {value}\r\n" for key, value in source.headers.items())
        if source.left_bytes is not None:
            headers += f"{LEFT_HEADER}: {source.left_bytes}\r\n"
        text = f"GET {source.folder}/{name} HTTP/1.1\r\nHost: {source.host}\r\n{headers}{more}\r\n"
        return text.encode("latin-1")

    def _connect(self) -> socket.socket:
        source = self._source
        plain = socket.create_connection((source.host, source.port), timeout=source.connect_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = source.tls.wrap_socket(plain, server_hostname=source.host, do_handshake_on_connect=False)
        self._sock = sock  # from here on it can be aborted
        sock.do_handshake()
        sock.settimeout(source.idle_s)
        return sock


class _Answer:
    """The head of an answer, and its body as it is read."""

    def __init__(self, sock: socket.socket, head: bytes, early: bytes) -> None:
        """`early`: the front of the body, which came with the head. Raises `Unusable` on what is no HTTP."""
        lines = head.decode("latin-1").split("\r\n")
        status = _STATUS.fullmatch(lines[0])
        headers = dict(_header(line) for line in lines[1:])
        length = headers.get("content-length", "")
        if status is None or not _LENGTH.fullmatch(length):
            raise Unusable(f"an answer without a status or a length: {lines[0][:80]!r}")
        self.status = int(status[1])
        self.left = int(length)
        """Bytes of the body that are not read yet."""
        self.content_range = headers.get("content-range", "")
        self.keeps_open = headers.get("connection", "").lower() != "close"
        self._sock = sock
        self._early = early

    def fill(self, view: memoryview) -> None:
        """Fill the view with the next bytes of the body."""
        if len(view) > self.left:
            raise Unusable("the answer is too short")
        if self._early:
            count = min(len(view), len(self._early))
            view[:count], self._early = self._early[:count], self._early[count:]
            view = view[count:]
            self.left -= count
        receive, left = self._sock.recv_into, len(view)
        while left:
            count = receive(view, left)  # TLS gives 16 KiB at a time: without a length `ssl` measures each
            if count == 0:
                raise Unusable("the connection ended early")
            left -= count
            self.left -= count
            view = view[count:]


_STATUS = re.compile(r"HTTP/1\.[01] ([0-9]{3})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,18}")
_HEAD_BYTES = 16 * 1024


def _read_head(sock: socket.socket, longest_s: float) -> _Answer:
    """Read up to the end of the head, which a server has so long for however it drips."""
    data = b""
    give_up_at = time.monotonic() + longest_s
    while (end := data.find(b"\r\n\r\n")) < 0:
        if len(data) >= _HEAD_BYTES or time.monotonic() > give_up_at:
            raise Unusable("an answer without an end of its head")
        more = sock.recv(_HEAD_BYTES)
        if not more:
            raise Unusable("the connection ended early")
        data += more
    return _Answer(sock, data[:end], data[end + 4 :])


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _refuse(version: int, status: int, *, expected: int) -> None:
    """Raise the error that the status stands for, unless it is the expected one."""
    if status == expected:
        return
    if status in (401, 403):
        raise ProtocolError(
            f"the weight server refused our token (HTTP {status})",
            "use the token and address of the same run",
        )
    if status == 404:
        raise Absent(
            f"the weight server does not have version {version}, or no longer", "pull the newest version"
        )
    if status == 503:
        raise Unusable(f"the head does not have version {version} again yet")
    raise Unusable(f"HTTP {status}")
