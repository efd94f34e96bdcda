"""An asyncio event loop on virtual time, with processes on it that can be killed and paused.

Time passes only while nothing is left to do, so hours take seconds and the same seed gives the same order of
everything. A `Process` is a context: whatever was started within it stops for good when it is killed, as with
SIGKILL: no `finally` runs. While it is paused, as with SIGSTOP, what would have run waits.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

_CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


TURN_S = 1e-6
"""What a turn of the loop takes: a deadline that is a rounding error away comes."""


class Process:
    """What lives and dies together. `name` is for traces."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self._held: deque[Callable[[], None]] = deque()
        self._context = contextvars.Context()
        self._context.run(_CURRENT.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` within the process."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def kill(self) -> None:
        """End it at once; nothing of it runs again."""
        self.is_alive = False
        self._held.clear()

    def pause(self) -> None:
        """Hold everything back until `go_on`."""
        self.is_paused = True

    def go_on(self) -> None:
        """Run what was held back, in its order."""
        self.is_paused = False
        loop = asyncio.get_running_loop()
        while self._held:
            loop.call_soon(self._held.popleft(), context=self._context.copy())

    def run(self, callback: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Call it now, later, or never."""
        if self.is_paused and self.is_alive:
            context = contextvars.copy_context()
            self._held.append(lambda: context.copy().run(self.run, callback, arguments))
        elif self.is_alive:
            callback(*arguments)


class OrderedTask(asyncio.Task[Any]):
    """A task whose place in a set follows from its number, not from its address."""

    _num_made = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        OrderedTask._num_made += 1
        self._number = OrderedTask._num_made
        super().__init__(*arguments, **options)
        self._log_destroy_pending = False  # a killed process leaves its tasks as they are

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    @classmethod
    def restart(cls) -> None:
        """Count from 0 again."""
        cls._num_made = 0


class _Passing(selectors.SelectSelector):
    """Instead of waiting for files lets the time pass."""

    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self._passes(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `blocking_s` gives how long a call takes that would run in a thread."""

    def __init__(self, blocking_s: Callable[[], float]) -> None:
        self._time = 0.0
        self._blocking_s = blocking_s
        self.tasks: list[asyncio.Task[Any]] = []
        """All of them: one that is collected as garbage runs its `finally`, which a killed one must not."""
        super().__init__(_Passing(self._pass))
        self.set_task_factory(self._make_task)

    def _make_task(self, loop: Any, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = OrderedTask(work, loop=loop, **options)
        self.tasks.append(task)
        return task

    def _pass(self, seconds: float) -> None:
        self._time += max(TURN_S, seconds)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._time

    def pass_blocked(self, seconds: float) -> None:
        """Sleep within a call that `run_in_executor` made: everything waits for it."""
        self._pass(seconds)

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Call it in this turn or the next; what is left of a loop that is over calls nothing."""
        if self.is_closed():
            return asyncio.Handle(callback, arguments, self)
        context = contextvars.copy_context() if context is None else context
        return super().call_soon(self._guarded(callback, context), *arguments, context=context)

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Call it at a time of the loop."""
        context = contextvars.copy_context() if context is None else context
        return super().call_at(when, self._guarded(callback, context), *arguments, context=context)

    def call_soon_threadsafe(self, callback: Any, *arguments: Any, context: Any = None) -> Any:  # type: ignore[override]
        """There is one thread."""
        return self.call_soon(callback, *arguments, context=context)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:  # type: ignore[override]
        """Call it on this thread, once the time has passed that it takes."""
        future = self.create_future()

        def answer() -> None:
            try:
                value = function(*arguments)
            except Exception as problem:  # noqa: BLE001 - it is the caller's
                if not future.cancelled():
                    future.set_exception(problem)
            else:
                if not future.cancelled():
                    future.set_result(value)

        self.call_later(self._blocking_s(), answer)
        return future

    def add_signal_handler(self, sig: int, callback: Any, *arguments: Any) -> None:  # type: ignore[override]
        """Processes here are killed, not asked."""

    def forget(self) -> None:
        """End, with all tasks of processes that were killed."""
        self.tasks.clear()
        self._scheduled.clear()  # type: ignore[attr-defined]
        self._ready.clear()  # type: ignore[attr-defined]
        self.close()

    def _guarded(self, callback: Any, context: contextvars.Context) -> Any:
        process = context.get(_CURRENT)
        if process is None:
            return callback
        return lambda *arguments: process.run(callback, arguments)


OUTSIDE = contextvars.Context()
"""Of what happens between processes: it goes on when they die."""
