"""Work beside training: one piece at a time, in order, on a thread of its own.

Guarantees: at most one piece is under way, so memory is bounded by what one needs; what goes wrong in it is
raised in the training thread at its next `ready` or `start`, or at the end, so that no run goes on for long
without what the work was for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class BackgroundWork:
    """One thread's work; the methods belong to one other thread. `with` waits for the last piece."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's, for debuggers."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._piece: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.ready()

    @property
    def is_busy(self) -> bool:
        """True while a piece is under way."""
        return self._piece is not None and not self._piece.done()

    def ready(self) -> None:
        """Return once nothing is under way any more. Raises what the last piece raised."""
        if self._piece is not None:
            piece, self._piece = self._piece, None
            piece.result()

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work` once the piece before it is done. Raises what that one raised."""
        self.ready()
        self._piece = self._thread.submit(work)
