"""Threads for calls to a provider, which block: launches, which take minutes, keep nothing else waiting.

Guarantees: listing or terminating machines waits for no launch, however many are under way, and for none of
the event loop's own threads. Calls beyond the number of threads wait their turn. Only an `RLBoostError` or an
`OSError` is raised, whatever a cloud's own library raised.

`keep_console` saves the serial console of a machine that never dialled in. It raises nothing, whatever the
cloud answers: its caller has something else to do.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlboost_providers.base.provider import CanShowConsole, Provider
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
        """Return what `ask` returns; its thread goes on if the caller is cancelled."""
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
            f"unexpected provider error: {type(error).__name__}: {error}",
            "retried automatically; please report the traceback in the coordinator's log",
        ) from error


_UNPRINTED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\t\n -~\u00a0-\uffff]")
"""Colours, cursor moves and other control characters."""


@dataclass(frozen=True, slots=True)
class Console:
    """The text of a machine's console, saved in `log`, or why it cannot be read."""

    lines: tuple[str, ...]
    log: Path
    refusal: str = ""


def keep_console(provider: Provider, run: str, machine: str, folder: Path) -> Console | None:
    """Fetch the end of a machine's console into `folder`/console.log; None if its cloud keeps none.

    Blocks for a second, or until the cloud's calls time out. An empty one leaves no file.
    """
    if not isinstance(provider, CanShowConsole):
        return None
    log = folder / "console.log"
    try:
        text = _UNPRINTED.sub("", provider.console(run, machine).replace("\r", "\n"))
        lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
        if lines:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except RLBoostError as refusal:
        return Console((), log, refusal.problem)
    except OSError as refusal:
        return Console((), log, str(refusal))
    return Console(lines, log)
