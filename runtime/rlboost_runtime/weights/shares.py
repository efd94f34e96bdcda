"""Who may send how much at once: a weight server's receivers share its link fairly, and the one that can
serve soonest goes first.

The network divides a link by connections, so shares are given as numbers of connections that may send: each
receiver has `STREAMS`. While some receiver serves nothing and waits for its weights (a *newcomer*), the one
of these that needs the fewest bytes keeps its `STREAMS` and every other receiver has one. A connection that
may not send pauses between two pieces, never longer than `LONGEST_PAUSE_S`, so that no deadline of its
receiver passes. A receiver that does not read takes nothing from anybody: it pauses in its own thread; and a
newcomer that cannot use its turn, because its own link is slow, loses it for `SLOW_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

STREAMS = 8
"""Of one receiver at once: twice what pulls use by default."""
LONGEST_PAUSE_S = 4.0
"""Below the pullers' 10 s of silence after which they give a connection up."""
WINDOW_S = 1.0
"""Over which it is looked who takes how much."""
SLOW_S = 10.0
"""How long a newcomer that took less than half of what another took in its turn does not go first."""


@dataclass(eq=False, slots=True)
class Sending:
    """One answer under way. `left_bytes`: what its receiver still needs; None: it serves meanwhile."""

    receiver: str
    left_bytes: int | None


@dataclass(slots=True)
class Shares:
    """All answers under way. Methods may be called by any thread."""

    _sending: dict[str, list[Sending]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _taken: dict[str, int] = field(default_factory=dict)  # bytes by receiver in this window
    _window_at: float = 0.0
    _turn: tuple[str | None, float] = (None, 0.0)  # who goes first, since when
    _slow_until: dict[str, float] = field(default_factory=dict)
    _now: Callable[[], float] = time.monotonic

    def begin(self, receiver: str, left_bytes: int | None) -> Sending:
        """Register an answer; `end` must follow."""
        with self._changed:
            sending = Sending(receiver, left_bytes)
            self._sending.setdefault(receiver, []).append(sending)
            self._changed.notify_all()
            return sending

    def end(self, sending: Sending) -> None:
        """The answer is sent, or given up."""
        with self._changed:
            others = self._sending[sending.receiver]
            others.remove(sending)
            if not others:
                del self._sending[sending.receiver]
            self._changed.notify_all()

    def wait(self, sending: Sending, sent: int = 0) -> bool:
        """Return once this answer may send its next piece; False where it goes on only not to fall silent.

        `sent`: bytes sent since the last call.
        """
        with self._changed:
            self._taken[sending.receiver] = self._taken.get(sending.receiver, 0) + sent
            self._judge()
            return self._changed.wait_for(lambda: self._may_send(sending), LONGEST_PAUSE_S)

    def num_receivers(self) -> int:
        """Return how many receivers there are now."""
        with self._changed:
            return len(self._sending)

    def _may_send(self, sending: Sending) -> bool:
        own = self._sending.get(sending.receiver, [])
        if sending not in own:  # ended meanwhile: nobody needs to pause for it
            return True
        return own.index(sending) < self._num_streams(sending.receiver)

    def _num_streams(self, receiver: str) -> int:
        first = self._soonest()
        return STREAMS if first is None or first == receiver else 1

    def _soonest(self) -> str | None:
        """Return the newcomer that can serve soonest, None where all receivers serve."""
        needs = {name: _left(answers) for name, answers in self._sending.items()}
        newcomers = [
            (left, name) for name, left in needs.items() if left is not None and name not in self._slow_until
        ]
        return min(newcomers)[1] if newcomers else None

    def _judge(self) -> None:
        """At the end of a window see whether who went first all along made use of it."""
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
