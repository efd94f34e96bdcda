"""Step metrics for TensorBoard and Weights & Biases, as the job's `tracking` asks for.

Guarantees: a run that comes back goes on with the same curves. What it repeats replaces what TensorBoard has;
W&B keeps what it was told first. A tracker that is asked for and not installed is a `ConfigError` before the
run begins; one that fails (a full disk, no network) is switched off with a warning and never ends a run, nor
holds it up for longer than `OPEN_S` at its beginning and `CLOSE_S` at its end. W&B that cannot be reached at
the beginning is kept offline instead.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

from rlboost_runtime.errors import ConfigError
from rlboost_runtime.job import Job, Wandb
from rlboost_runtime.logs import event
from rlboost_runtime.run.folder import RunFolder

log = logging.getLogger(__name__)


OPEN_S = 60.0
"""Longest time that W&B may take to begin a run."""
CLOSE_S = 60.0
"""Longest time for the last curves to arrive at W&B; what is left then lies in the run's `wandb/`."""


Tracker: TypeAlias = "_TensorBoard | _Wandb"
"""One place that curves go to."""


class Trackers:
    """All that the job asks for; opened before the first step, for the training thread."""

    def __init__(self, run: RunFolder, job: Job, first_step: int) -> None:
        """Raises `ConfigError`."""
        wanted = job.tracking.wandb
        self._trackers: list[Tracker] = []
        if job.tracking.tensorboard:
            _require("tensorboard")
            self._open("tensorboard", lambda: _TensorBoard(run, first_step))
        if wanted is None:
            return
        _require("wandb")
        if wanted.offline or not self._open("wandb", lambda: _Wandb(run, job, wanted)):
            kept = wanted.model_copy(update={"offline": True})
            self._open("wandb, offline", lambda: _Wandb(run, job, kept))

    def _open(self, name: str, make: Callable[[], Tracker]) -> bool:
        """Add a tracker; return whether it could be opened."""
        try:
            self._trackers.append(make())
        except Exception as problem:  # noqa: BLE001 - as below
            event(log, "tracking.not_opened", level=logging.WARNING, tracker=name, problem=repr(problem))
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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

        settings = wandb.Settings(
            console="off", silent=True, init_timeout=OPEN_S, login_timeout=OPEN_S, finish_timeout=CLOSE_S,
        )  # fmt: skip
        try:
            self._run: Any = wandb.init(  # its types are incomplete
                project=wanted.project, entity=wanted.entity, name=run.name, id=run.name, resume="allow",
                dir=str(run.path), mode="offline" if wanted.offline else "online",
                config=job.model_dump(mode="json"), settings=settings,
            )  # fmt: skip
        except Exception:
            wandb.teardown()  # its service would hold the name of this run
            raise

    def log(self, step: int, line: Mapping[str, float]) -> None:
        self._run.log(dict(line), step=step)

    def close(self) -> None:
        self._run.finish()
