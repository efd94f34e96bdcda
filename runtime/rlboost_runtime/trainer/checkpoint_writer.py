"""Checkpoints written beside training, in order.

Guarantees: `on_durable` is called, on the writer's thread, only once the checkpoint would survive a power
cut; failures and bounds are those of `background_work`: memory holds two copies at most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rlboost_runtime.logs import event
from rlboost_runtime.trainer import checkpoint
from rlboost_runtime.trainer.background_work import BackgroundWork
from rlboost_runtime.trainer.checkpoint import Checkpoint

log = logging.getLogger(__name__)


class CheckpointWriter(BackgroundWork):
    """Writes what it is given."""

    def __init__(self, checkpoints: Path, *, keep: int, on_durable: Callable[[int], None]) -> None:
        """`on_durable` gets the step that a checkpoint follows."""
        super().__init__("checkpoint")
        self.last_write_s = 0.0
        """Seconds that the last finished write took; training went on meanwhile."""
        self._checkpoints = checkpoints
        self._keep = keep
        self._on_durable = on_durable

    def submit(self, taken: Checkpoint) -> None:
        """Write a checkpoint; returns at once if nothing else is being written."""
        self.start(lambda: self._write(taken))

    def _write(self, taken: Checkpoint) -> None:
        started = time.monotonic()
        checkpoint.write(self._checkpoints, taken, keep=self._keep)
        self.last_write_s = time.monotonic() - started
        event(log, "checkpoint.written", step=taken.state.step, seconds=round(self.last_write_s, 3))
        self._on_durable(taken.state.step)
