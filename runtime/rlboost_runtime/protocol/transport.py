"""The live network seam: sockets to listen on; whole binary messages over one TLS WebSocket that we dialled.

Guarantees: the server is the one that holds the given certificate, or nothing is sent to it, the token
included; whatever goes wrong with the network is a `ConnectionError`, before and after the connection is
open; a refusal that asking again cannot change (wrong token, wrong certificate) is a `ProtocolError`.

There are no WebSocket pings: the protocol's own heartbeats show whether a peer lives, on our own clock.
"""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as dial
from websockets.exceptions import ConnectionClosed, InvalidStatus, InvalidURI, WebSocketException

from rlboost_runtime.errors import ProtocolError
from rlboost_runtime.protocol.messages import MAX_MESSAGE_BYTES
from rlboost_runtime.run import security
from rlboost_runtime.seams import Transport

CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for the peer's answer: enough for a live one; a dead one must not hold us up."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host`; `port` 0: a free one. Raises `OSError`.

    Small messages leave at once. asyncio sees to that for sockets that it makes, but not for those that it is
    given: there a second message waits until the first is acknowledged, up to 40 ms.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones have it, too
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(1024)
    return listener


async def connect(url: str, token: str, certificate_pem: str, *, timeout_s: float) -> Transport:
    """Open a connection to `url` (https:// or wss://), all within `timeout_s` seconds.

    Raises `ConnectionError` where that did not work now, `ProtocolError` where it never will: not our
    certificate, token refused, or no such kind of URL. Proxies of the environment are not used.
    """
    address = _websocket_url(url)
    try:
        connection = await dial(
            address,
            ssl=security.client_context(certificate_pem),
            additional_headers={"Authorization": f"Bearer {token}"},
            proxy=None,
            compression=None,
            max_size=MAX_MESSAGE_BYTES,
            ping_interval=None,
            open_timeout=timeout_s,
            close_timeout=CLOSE_TIMEOUT_S,
        )
    except ssl.SSLCertVerificationError as exc:
        raise ProtocolError(
            f"{address} shows another certificate than the run's ({exc.verify_message})",
            "check that the address belongs to this run's head",
        ) from exc
    except InvalidStatus as exc:
        raise _refusal(address, exc.response.status_code) from exc
    except InvalidURI as exc:
        raise _bad_url(url) from exc
    except TimeoutError as exc:
        raise ConnectionError(f"{address} did not answer within {timeout_s:g} s") from exc
    except (OSError, WebSocketException) as exc:
        raise ConnectionError(f"{address} cannot be reached: {exc}") from exc
    return WebSocketTransport(connection)


class WebSocketTransport:
    """A `Transport` over an open connection. One task may send while another receives."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, message: bytes) -> None:
        """Send; waits while the peer does not read. Raises `ConnectionError` once closed."""
        try:
            await self._connection.send(message)
        except ConnectionClosed as exc:
            raise ConnectionError(f"connection closed: {exc}") from exc

    async def receive(self) -> bytes:
        """Return the next message. Raises `ConnectionError` once closed."""
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as exc:
            raise ConnectionError(f"connection closed: {exc}") from exc

    async def close(self) -> None:
        """Close; idempotent, and bounded even where the peer is gone."""
        await self._connection.close()


def _websocket_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("https", "wss") or not parts.hostname:
        raise _bad_url(url)
    return parts._replace(scheme="wss").geturl()


def _bad_url(url: str) -> ProtocolError:
    return ProtocolError(f"cannot dial {url!r}", "give a URL such as https://HOST:PORT/v1/agent")


def _refusal(address: str, status: int) -> ProtocolError | ConnectionError:
    if status in (401, 403):
        return ProtocolError(
            f"{address} refused our token (HTTP {status})",
            "use the token and address of the same run; `rlboost down` ends machines of another one",
        )
    return ConnectionError(f"{address} answered HTTP {status} instead of opening a WebSocket")
