"""Who may send how much at once: a weight server's receivers share its link fairly, and the one that can
serve soonest goes first.

The network divides a link by connections, so shares are given as numbers of connections that may send: each
receiver has `STREAMS`. While some receiver serves nothing and waits for its weights (a *newcomer*), the one
of these that needs the fewest bytes keeps its `STREAMS` and every other receiver has one. A connection that
may not send pauses between two pieces, never longer than `LONGEST_PAUSE_S`, so that no deadline of its
receiver passes. A receiver that does not read takes nothing from anybody: it pauses in its own thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

STREAMS = 8
"""Of one receiver at once: twice what pulls use by default."""
LONGEST_PAUSE_S = 4.0
"""Below the pullers' 10 s of silence after which they give a connection up."""


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

    def wait(self, sending: Sending) -> bool:
        """Return once this answer may send its next piece; False where it goes on only not to fall silent."""
        with self._changed:
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
        newcomers = [(left, name) for name, left in needs.items() if left is not None]
        return min(newcomers)[1] if newcomers else None


def _left(answers: list[Sending]) -> int | None:
    known = [answer.left_bytes for answer in answers if answer.left_bytes is not None]
    return min(known, default=None)
