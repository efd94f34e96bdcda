"""Threads for calls to a provider, which block: launches, which take minutes, keep nothing else waiting.

Guarantees: a look at the machines or an end waits for no launch, however many are under way, and for none of
the event loop's own threads. Whoever asks for more at once than there are threads waits its turn. What is
raised is a failure that we can explain or an `OSError`, whatever a cloud's own library raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rlboost_runtime.errors import ProviderError, RLBoostError
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

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
        return await asyncio.get_running_loop().run_in_executor(self._others, _explained, ask)

    def launch(self, ask: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a launch."""
        return asyncio.get_running_loop().run_in_executor(self._launches, _explained, ask)

    def close(self) -> None:
        """Begin nothing more; calls under way go on."""
        for pool in (self._launches, self._others):
            pool.shutdown(wait=False, cancel_futures=True)


def _explained(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except (RLBoostError, OSError):
        raise
    except Exception as error:
        event(log, "provider.broke", level=logging.ERROR, exc_info=True, problem=repr(error))
        raise ProviderError(
            f"the provider failed in a way that it does not explain: {type(error).__name__}: {error}",
            "asked again by itself; the coordinator's log has the traceback, which belongs in a report to us",
        ) from error
