"""The connections of a weight server: which of them it ends, and how they share its link.

Guarantees of `Connections`: beyond `MAX_CONNECTIONS` none is accepted; one that has not shown the token
within `AUTHORISE_S` is ended, and so is one that takes less than `LEAST_BYTES` in `UNREAD_S` of what is being
sent to it: a vanished or idling machine holds nothing. The thread that serves a connection only counts; one
watcher checks all counts, so that sending may block in the kernel, without reading the clock for each 16 KiB.

`FairShare`: receivers share the link fairly, and the one that can serve soonest goes first. The network
divides a link by connections, so shares are numbers of connections that may send: each receiver has
`STREAMS`. While some receiver serves nothing and waits for its weights (a *newcomer*), the newcomer that
needs the fewest bytes keeps its `STREAMS` and every other receiver has one. A connection that may not send
pauses between two pieces, never longer than `LONGEST_PAUSE_S`, so that no deadline of its receiver passes. A
receiver that does not read slows down no other: it pauses in its own thread; and a newcomer that cannot use
its turn, because its own link is slow, loses it for `SLOW_S`.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

AUTHORISE_S = 20.0
"""From the first byte to the token: without one no connection is held for long."""
UNREAD_S = 30.0
LEAST_BYTES = 64 * 1024
MAX_CONNECTIONS = 1024


@dataclass(eq=False, slots=True)
class Connection:
    """One connection. Its thread writes the public attributes, the watcher reads them."""

    sock: socket.socket
    is_authorised: bool = False
    sent_bytes: int = 0
    _began_at: float = field(default_factory=time.monotonic)
    _receiver: str | None = None  # who is being sent to
    _seen_bytes: int = 0
    _seen_at: float = 0.0

    @contextmanager
    def sending_to(self, receiver: str) -> Iterator[None]:
        """Within this context the receiver has to read what is being sent."""
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

    def check(self, now: float) -> None:
        """End it if it breaks a limit."""
        receiver = self._receiver
        if not self.is_authorised and now > self._began_at + AUTHORISE_S:
            self.shut()
        elif self.sent_bytes - self._seen_bytes >= LEAST_BYTES:
            self._seen_bytes, self._seen_at = self.sent_bytes, now
        elif receiver is not None and now > self._seen_at + UNREAD_S:
            self._receiver = None  # reported once
            event(log, "weights.receiver_cut_off", level=logging.WARNING, receiver=receiver)
            self.shut()


class Connections:
    """All connections, by the socket that was accepted. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._open: dict[socket.socket, Connection] = {}
        self._lock = threading.Lock()

    def add(self, sock: socket.socket) -> bool:
        """Add one; close it and return False if there are too many."""
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
        """Remove one, which its thread has ended."""
        with self._lock:
            self._open.pop(sock, None)

    def check(self) -> None:
        """End those that break a limit; to be called at short intervals."""
        now = time.monotonic()
        with self._lock:
            for connection in self._open.values():
                connection.check(now)

    def shut(self) -> None:
        """End all."""
        with self._lock:
            for connection in self._open.values():
                connection.shut()


STREAMS = 8
"""Of one receiver at once: twice what pulls use by default."""
LONGEST_PAUSE_S = 4.0
"""Below the pullers' 10 s of silence after which they give a connection up."""
WINDOW_S = 1.0
"""Over which bytes per receiver are counted."""
SLOW_S = 10.0
"""How long a newcomer does not go first after it took less than half of what another took in its turn."""


@dataclass(eq=False, slots=True)
class Sending:
    """One response under way. `left_bytes`: what its receiver still needs; None: it serves meanwhile."""

    receiver: str
    left_bytes: int | None


@dataclass(slots=True)
class FairShare:
    """All responses under way. Methods may be called by any thread."""

    _sending: dict[str, list[Sending]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _taken: dict[str, int] = field(default_factory=dict)  # bytes by receiver in this window
    _window_at: float = 0.0
    _turn: tuple[str | None, float] = (None, 0.0)  # the receiver that goes first, since when
    _slow_until: dict[str, float] = field(default_factory=dict)
    _now: Callable[[], float] = time.monotonic

    def begin(self, receiver: str, left_bytes: int | None) -> Sending:
        """Register a response; `end` must follow."""
        with self._changed:
            sending = Sending(receiver, left_bytes)
            self._sending.setdefault(receiver, []).append(sending)
            self._changed.notify_all()
            return sending

    def end(self, sending: Sending) -> None:
        """Remove a response that is sent, or given up."""
        with self._changed:
            others = self._sending[sending.receiver]
            others.remove(sending)
            if not others:
                del self._sending[sending.receiver]
            self._changed.notify_all()

    def wait(self, sending: Sending, sent: int = 0) -> bool:
        """Return once this response may send its next piece; False if it goes on only to avoid silence.

        `sent`: bytes sent since the last call.
        """
        with self._changed:
            self._taken[sending.receiver] = self._taken.get(sending.receiver, 0) + sent
            self._end_window()
            return self._changed.wait_for(lambda: self._may_send(sending), LONGEST_PAUSE_S)

    def _may_send(self, sending: Sending) -> bool:
        own = self._sending.get(sending.receiver, [])
        if sending not in own:  # ended meanwhile
            return True
        return own.index(sending) < self._num_streams(sending.receiver)

    def _num_streams(self, receiver: str) -> int:
        first = self._soonest()
        return STREAMS if first is None or first == receiver else 1

    def _soonest(self) -> str | None:
        """Return the newcomer that can serve soonest, None if all receivers serve."""
        needs = {name: _left(answers) for name, answers in self._sending.items()}
        newcomers = [
            (left, name) for name, left in needs.items() if left is not None and name not in self._slow_until
        ]
        return min(newcomers)[1] if newcomers else None

    def _end_window(self) -> None:
        """At the end of a window check that the receiver that went first made use of it."""
        now = self._now()
        first = self._soonest()
        if first != self._turn[0]:
            self._turn = (first, now)
        if now < self._window_at + WINDOW_S:
            return
        if first is not None and self._turn[1] <= self._window_at:
            others = max((num for name, num in self._taken.items() if name != first), default=0)
            if 2 * self._taken.get(first, 0) < others:
                self._slow_until[first] = now + SLOW_S
        for name in [name for name, until in self._slow_until.items() if until <= now]:
            del self._slow_until[name]
        self._taken.clear()
        self._window_at = now
        self._changed.notify_all()


def _left(answers: list[Sending]) -> int | None:
    known = [answer.left_bytes for answer in answers if answer.left_bytes is not None]
    return min(known, default=None)
