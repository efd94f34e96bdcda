"""The queue of waiting responses of the open step, by the tokens that they keep: the longest first, as the
published code has it, or the one with the least first (`Policy.least_first`).

Whether an entry still waits is seen when it comes up.
"""

from __future__ import annotations

import heapq

from rlboost_runtime.core.responses import Response, ResponseState


class WaitingQueue:
    """Waiting responses by the tokens that they keep, then in the order of the step's request."""

    def __init__(self, *, least_first: bool = False) -> None:
        self._sign = 1 if least_first else -1
        self._heap: list[tuple[int, int, int, Response]] = []

    def add(self, response: Response) -> None:
        """Queue a waiting response."""
        rank = self._sign * response.num_tokens
        heapq.heappush(self._heap, (rank, response.order, response.num_assignments, response))

    def peek(self) -> Response | None:
        """Return the first that waits."""
        while self._heap and not is_current(*self._heap[0][2:]):
            heapq.heappop(self._heap)  # it ended, or was given out, while it was here
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Response:
        """Take out the one that `peek` returned."""
        return heapq.heappop(self._heap)[3]

    def all(self) -> list[Response]:
        """Return all that wait, in no order. Looks at everything: for checks and whole-step decisions."""
        return [entry[3] for entry in self._heap if is_current(*entry[2:])]

    def clear(self) -> None:
        """Forget everything."""
        self._heap.clear()


def is_current(num_assignments: int, response: Response) -> bool:
    """Whether the response has waited ever since it was queued with so many assignments behind it."""
    return response.num_assignments == num_assignments and response.state is ResponseState.WAITING
