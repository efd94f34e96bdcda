"""Checkpoints written beside training: one at a time, in order, on a thread of their own.

Guarantees: `on_durable` is called, on that thread, only once the checkpoint would survive a power cut; what
goes wrong there is raised in the training thread at its next `ready` or `submit`, or at the end, so that no
run goes on for long without checkpoints. At most one is waited for, so memory is bounded by two copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from rlboost_runtime.logs import event
from rlboost_runtime.trainer import checkpoint
from rlboost_runtime.trainer.checkpoint import Checkpoint

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes what it is given; its methods belong to the training thread. `with` waits for the last one."""

    def __init__(self, checkpoints: Path, *, keep: int, on_durable: Callable[[int], None]) -> None:
        """`on_durable` gets the step that a checkpoint follows."""
        self.last_write_s = 0.0
        """Seconds that the last finished write took; training went on meanwhile."""
        self._checkpoints = checkpoints
        self._keep = keep
        self._on_durable = on_durable
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.ready()

    def ready(self) -> None:
        """Return once nothing is being written any more. Raises what the last write raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def submit(self, taken: Checkpoint) -> None:
        """Write a checkpoint; returns at once if nothing else is being written."""
        self.ready()
        self._writing = self._thread.submit(self._write, taken)

    def _write(self, taken: Checkpoint) -> None:
        started = time.monotonic()
        checkpoint.write(self._checkpoints, taken, keep=self._keep)
        self.last_write_s = time.monotonic() - started
        event(log, "checkpoint.written", step=taken.state.step, seconds=round(self.last_write_s, 3))
        self._on_durable(taken.state.step)
