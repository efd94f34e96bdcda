"""A trainer's session with the coordinator, kept by a thread of its own.

Guarantees: those of `protocol.session`; `changed` guards all state here and in the conversation's
`welcomed`, and is notified of changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.protocol.messages import Message, TrainerCommand, TrainerWelcome
from rlboost_runtime.protocol.session import Conversation, CoordinatorSession
from rlboost_runtime.seams import SystemClock, Transport

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class CoordinatorLink:
    """See the module. All callbacks are called on the link's thread, `welcomed` under the lock.

    `dial` opens a connection; it raises `ConnectionError` or `RLBoostError`.
    """

    def __init__(
        self,
        changed: threading.Condition,
        dial: Callable[[], Awaitable[Transport]],
        conversation: Conversation[TrainerWelcome, TrainerCommand],
    ) -> None:
        self._changed = changed
        self._welcome = conversation.welcomed
        self._problem: BaseException | None = None
        self._closing = False
        self._connected = False
        self._num_unsent = 0
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run_loop, name="coordinator-link")
        self._session = CoordinatorSession(
            dial,
            replace(conversation, welcomed=self._welcomed, sent=self._sent, lost=self._lost),
            SystemClock(),
        )

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def post(self, message: Message) -> None:
        """Queue a message if connected; otherwise the next connection begins with what matters. Call it under
        the lock."""
        if self._connected:
            self._num_unsent += 1
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                self._loop.call_soon_threadsafe(self._session.post, message)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything was sent; return False if that took longer. Call it under the lock."""
        return self._changed.wait_for(
            lambda: self._problem is not None or (self._connected and self._num_unsent == 0), timeout_s
        ) and (self._problem is None)

    def raise_problem(self) -> None:
        """Raise what ended the link, if anything did. Call it under the lock."""
        if isinstance(self._problem, RLBoostError):
            raise self._problem
        if self._problem is not None:
            raise RuntimeFault(f"the step stream broke: {self._problem!r}", "see the trainer's log") from (
                self._problem
            )
        if self._closing:
            raise RuntimeFault("the step stream is closed", "open a new one")

    def close(self) -> None:
        """End connection and thread; what was not sent yet gets `CLOSE_TIMEOUT_S`. Idempotent."""
        if not self._thread.is_alive():
            if not self._loop.is_closed():
                self._loop.close()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._num_unsent == 0 or not self._connected, CLOSE_TIMEOUT_S)
            self._closing = True
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except asyncio.CancelledError:
            assert self._closing
        except BaseException as exc:  # noqa: BLE001 - the thread's edge: raised to whoever waits
            if not isinstance(exc, RLBoostError):
                event(log, "stream.failed", level=logging.ERROR, exc_info=True)
            with self._changed:
                self._problem = exc
                self._changed.notify_all()

    async def _serve(self) -> None:
        self._serving = asyncio.current_task()
        if not self._closing:
            await self._session.run()

    # --- the session's callbacks --------------------------------------------------------------------------

    def _welcomed(self, welcome: TrainerWelcome) -> list[Message]:
        with self._changed:
            messages = list(self._welcome(welcome))
            self._num_unsent = len(messages)
            self._connected = True
            self._changed.notify_all()
        event(log, "stream.connected", published_version=welcome.published_version)
        return messages

    def _sent(self) -> None:
        with self._changed:
            self._num_unsent -= 1
            self._changed.notify_all()

    def _lost(self) -> None:
        with self._changed:
            self._connected = False
            self._num_unsent = 0
            self._changed.notify_all()
