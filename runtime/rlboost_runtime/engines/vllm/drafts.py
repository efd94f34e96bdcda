"""Speculative decoding on or off: measured, and turned off where it costs tokens/s.

Drafting helps while few requests decode and their text repeats itself; with a full batch the rejected
tokens cost more than the accepted ones save. `DraftGate` decides from counters (pure), `gate_drafts` acts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from statistics import median

from rlboost_runtime.engines.base import EngineProgress
from rlboost_runtime.engines.vllm.api import ApiError, VllmApi
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)

WINDOW_S = 2.0
"""Seconds of one measurement: dozens of decode steps."""
WINDOWS = 3
"""Measurements with, then without drafts, whose medians are compared."""
RECHECK_S = 120.0
"""Seconds until a decision is measured again: a step's tail is another load than its start."""


class DraftGate:
    """Compares tokens/s per running request with and without drafts, and keeps the faster."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # when, and how many tokens there were
        self._rates: dict[bool, list[float]] = {True: [], False: []}
        self._decided_at: float | None = None
        self.is_on = True

    def observe(self, at: float, num_tokens: int, num_running: int) -> bool:
        """Take counters at time `at` (seconds); return whether drafts shall be on until the next look.

        A window in which nothing ran is ignored.
        """
        last, self._last = self._last, (at, num_tokens)
        if last is None or num_running == 0 or num_tokens == last[1]:
            return self.is_on
        if self._decided_at is not None:
            if at - self._decided_at >= RECHECK_S:
                self._decided_at, self._rates, self.is_on = None, {True: [], False: []}, True
            return self.is_on
        rates = self._rates[self.is_on]
        rates.append((num_tokens - last[1]) / (at - last[0]) / num_running)
        if len(rates) >= WINDOWS:
            self._next(at)
        return self.is_on

    def _next(self, at: float) -> None:
        """Try the other side, or decide, once all windows of one side are measured."""
        if not self._rates[False]:
            self.is_on = False
            return
        self.is_on = median(self._rates[True]) > median(self._rates[False])
        self._decided_at = at

    @property
    def rates(self) -> tuple[float, float]:
        """Median tokens/s per request with and without drafts; 0 where not measured."""
        on, off = self._rates[True], self._rates[False]
        return (median(on) if on else 0.0, median(off) if off else 0.0)


async def gate_drafts(api: VllmApi, progress: Callable[[], EngineProgress]) -> None:
    """Keep the drafter as the gate decides, until cancelled or the server no longer answers."""
    gate = DraftGate()
    is_on = gate.is_on
    try:
        while True:
            await asyncio.sleep(WINDOW_S)
            now = progress()
            wanted = gate.observe(time.monotonic(), now.tokens_generated, now.running)
            if wanted is not is_on:
                await api.rpc("rlboost_draft", on="1" if wanted else "0")
                is_on = wanted
                with_drafts, without = gate.rates
                event(log, "drafts.switched", on=wanted, with_drafts=with_drafts, without=without)
    except ApiError as exc:
        event(log, "drafts.unwatched", level=logging.WARNING, problem=exc.problem)
