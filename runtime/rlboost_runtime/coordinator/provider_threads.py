"""Threads for calls to a provider, which block: launches, which take minutes, keep nothing else waiting.

Guarantee: a look at the machines or an end waits for no launch, however many are under way, and for none of
the event loop's own threads. Whoever asks for more at once than there are threads waits its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LAUNCHES = 16
"""Launches at once: a cloud throttles sooner than that."""
OTHERS = 16
"""Looks and ends at once."""


class ProviderThreads:
    """Two pools of threads. `call` and `launch` are for the event loop's thread."""

    def __init__(self) -> None:
        self._launches = ThreadPoolExecutor(LAUNCHES, "launch")
        self._others = ThreadPoolExecutor(OTHERS, "provider")

    async def call(self, ask: Callable[[], T]) -> T:
        """Return what `ask` returns; where nobody waits any more its thread goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._others, ask)

    def launch(self, ask: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a launch."""
        return asyncio.get_running_loop().run_in_executor(self._launches, ask)

    def close(self) -> None:
        """Begin nothing more; calls under way go on."""
        for pool in (self._launches, self._others):
            pool.shutdown(wait=False, cancel_futures=True)
