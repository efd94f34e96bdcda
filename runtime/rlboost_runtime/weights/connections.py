"""The connections that a weight server has with its receivers, and which of them it ends.

Guarantees: beyond `MAX_CONNECTIONS` none is taken; one that has not shown the token within `PROVE_S` is
ended, and so is one that takes less than `LEAST_BYTES` in `UNREAD_S` of what is being sent to it: a vanished
or idling machine holds nothing. The thread that serves a connection only counts; one watcher looks at all
counts, so that sending may block in the kernel, without a look at the clock for each 16 KiB.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

PROVE_S = 20.0
"""From the first byte to the token: whoever has none holds no connection for long."""
UNREAD_S = 30.0
LEAST_BYTES = 64 * 1024
MAX_CONNECTIONS = 1024


@dataclass(eq=False, slots=True)
class Connection:
    """One of them. Its thread writes the public attributes, the watcher reads them."""

    sock: socket.socket
    is_proved: bool = False
    sent_bytes: int = 0
    _began_at: float = field(default_factory=time.monotonic)
    _receiver: str | None = None  # who is being sent to
    _seen_bytes: int = 0
    _seen_at: float = 0.0

    @contextmanager
    def sending_to(self, receiver: str) -> Iterator[None]:
        """Meanwhile something is being sent, which it has to take."""
        self._seen_bytes, self._seen_at = self.sent_bytes, time.monotonic()
        self._receiver = receiver
        try:
            yield
        finally:
            self._receiver = None

    def shut(self) -> None:
        """Make the thread that serves it fail now."""
        with suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # SSLSocket's own would change its state

    def look(self, now: float) -> None:
        """End it where there is reason to."""
        receiver = self._receiver
        if not self.is_proved and now > self._began_at + PROVE_S:
            self.shut()
        elif self.sent_bytes - self._seen_bytes >= LEAST_BYTES:
            self._seen_bytes, self._seen_at = self.sent_bytes, now
        elif receiver is not None and now > self._seen_at + UNREAD_S:
            self._receiver = None  # said once
            event(log, "weights.receiver_cut_off", level=logging.WARNING, receiver=receiver)
            self.shut()


class Connections:
    """All of them, by the socket that was accepted. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._open: dict[socket.socket, Connection] = {}
        self._lock = threading.Lock()

    def add(self, sock: socket.socket) -> bool:
        """Take one; False where there are too many, and it is closed."""
        with self._lock:
            if len(self._open) < MAX_CONNECTIONS:
                self._open[sock] = Connection(sock)
                return True
        sock.close()
        return False

    def of(self, sock: socket.socket) -> Connection:
        """Return the connection that was accepted with this socket."""
        with self._lock:
            return self._open[sock]

    def drop(self, sock: socket.socket) -> None:
        """Forget one, which its thread has ended."""
        with self._lock:
            self._open.pop(sock, None)

    def look(self) -> None:
        """End those which there is reason to end; to be called every now and then."""
        now = time.monotonic()
        with self._lock:
            for connection in self._open.values():
                connection.look(now)

    def shut(self) -> None:
        """End all."""
        with self._lock:
            for connection in self._open.values():
                connection.shut()
