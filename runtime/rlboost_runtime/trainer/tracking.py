"""Step metrics for TensorBoard and Weights & Biases, as the job's `tracking` asks for.

Guarantees: a run that comes back goes on with the same curves: what it repeats replaces what was there. A
tracker that is asked for and not installed is a `ConfigError` before the run begins; one that fails later
(a full quota, no network) is switched off with a warning and never ends a run.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job, Wandb
from rlboost_runtime.logs import event
from rlboost_runtime.run_folder import RunFolder

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place that curves go to."""

    def log(self, step: int, line: Mapping[str, float]) -> None:
        """Take a step's metrics."""

    def close(self) -> None:
        """Write what is left."""


class Trackers:
    """All that the job asks for; opened before the first step, for the training thread."""

    def __init__(self, run: RunFolder, job: Job, first_step: int) -> None:
        """Raises `ConfigError`."""
        made: list[Tracker] = []
        if job.tracking.tensorboard:
            _require("tensorboard")
            made.append(_TensorBoard(run, first_step))
        if job.tracking.wandb is not None:
            _require("wandb")
            made.append(_Wandb(run, job, job.tracking.wandb))
        self._trackers = made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracker in list(self._trackers):
            self._guarded(tracker, tracker.close)

    def log(self, line: Mapping[str, float]) -> None:
        """Take a step's line of `metrics.jsonl`."""
        for tracker in list(self._trackers):
            self._guarded(tracker, lambda tracker=tracker: tracker.log(int(line["step"]), line))  # type: ignore[misc]

    def _guarded(self, tracker: Tracker, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as problem:  # noqa: BLE001 - a foreign service's edge: curves are not worth a run
            self._trackers.remove(tracker)
            event(
                log, "tracking.switched_off", level=logging.WARNING,
                tracker=type(tracker).__name__.strip("_"), problem=repr(problem),
            )  # fmt: skip


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"tracking.{package}: {package} is not installed on the head", f"pip install {package}"
        )


class _TensorBoard:
    """Event files in the run's `tensorboard/`; steps from the first one on replace what is there."""

    def __init__(self, run: RunFolder, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # a second to import

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step or None)

    def log(self, step: int, line: Mapping[str, float]) -> None:
        for name, value in line.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A W&B run of the same name; offline it lies in the run's `wandb/` and `wandb sync` sends it later."""

    def __init__(self, run: RunFolder, job: Job, wanted: Wandb) -> None:
        import wandb  # seconds to import

        self._run: Any = wandb.init(  # its types are incomplete
            project=wanted.project, entity=wanted.entity, name=run.name, id=run.name, resume="allow",
            dir=str(run.path), mode="offline" if wanted.offline else "online",
            config=job.model_dump(mode="json"), settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def log(self, step: int, line: Mapping[str, float]) -> None:
        self._run.log(dict(line), step=step)

    def close(self) -> None:
        self._run.finish()
