"""Keeps what the run has learned for the next run like it, after each trained step."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rlboost_runtime.core.base.messages import Command, Event, StepTrained
from rlboost_runtime.core.core import Core
from rlboost_runtime.run.priors import PriorStore
from rlboost_runtime.seams import Clock

COPY_EVERY = 20
"""Trained steps between two copies at the job's `output`; the first is copied at once."""


class PriorKeeper:
    """Keeps what a run has learned each time that a step is trained, and copies it in threads."""

    def __init__(self, store: PriorStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._num_kept = 0

    def observe(self, event: Event, commands: Sequence[Command], core: Core) -> None:
        """Take in one event after the core handled it."""
        if not isinstance(event, StepTrained) or (prior := core.prior()) is None:
            return
        self._store.write(prior, self._clock.wall())
        if self._num_kept % COPY_EVERY == 0 and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._store.copy, name="prior", daemon=True)
            self._thread.start()
        self._num_kept += 1
