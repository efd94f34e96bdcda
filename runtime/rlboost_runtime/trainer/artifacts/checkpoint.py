"""Checkpoints: everything that is needed to go on after step k as if nothing had happened.

`checkpoints/step-000012/` holds weights and moments as each rank had them (`learn/sharded_state.py`), those
of ppo's critic in `critic/`, `trainer.pt` (random number generators, and each parameter's number of updates),
config and tokenizer, `state.json`, and `digests.json`, the BLAKE3 digest of every other file. A folder of
that name is complete and durable: it is built under another name, synced and renamed. A damaged one is put
aside when a trainer starts, which goes on from the one before (`newest_intact`). Loading one on a CPU goes on
bit for bit, on any number of ranks.
The data cursor is the step itself (`data/prompts.py`), or in `state.json` (`data/feed.py`); what the window
has learned is in the coordinator's event log.

Training stands still while each rank copies its rows (`CheckpointWriter.copy`); everything else is beside
training, in order: memory holds one copy. `on_durable` is called on the writer's thread, only once the
checkpoint would survive a power cut; failures are those of `BackgroundWork`.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from rlboost_runtime.errors import ConfigError, RLBoostError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.run.folder import read_json, sync_path, write_json
from rlboost_runtime.trainer.artifacts.publisher import BackgroundWork
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.ranks import ALONE, Adam, Ranks
from rlboost_runtime.trainer.learn.sharded_state import CRITIC, METADATA, StateSaver, restore_moments

log = logging.getLogger(__name__)

_BUILDING = ".building-"
_DIGESTS = "digests.json"
_TRAINER = "trainer.pt"
STANDSTILL = 0.02
"""`checkpoint_every_steps: auto`: the share of the time for which training stands still to copy, at most."""


@dataclass(frozen=True, slots=True)
class TrainedState:
    """The step that a checkpoint follows, with its report, which is sent and written again if the trainer was
    killed before it could. `policy_version`: the version published after the step. `ahead`: [step, policy
    version, updates in it] of the steps that had been requested. `feed`: of the prompts that follow
    (`data/feed.py`)."""

    step: int
    policy_version: int
    wait_s: float
    busy_s: float
    tokens_trained: int
    reward_mean: float | None
    line: dict[str, float]
    ahead: list[list[int]] = field(default_factory=list)
    feed: dict[str, Any] | None = None  # JSON values


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is being written, in `folder`, whose name is not yet a checkpoint's."""

    folder: Path
    shards: Future[dict[str, str]]
    """The digests of the files that the ranks write."""
    files: Mapping[str, bytes]
    trainer: dict[str, object]
    """What `trainer.pt` holds."""


class TrainingState:
    """What a checkpoint is taken of, and restored to; on rank 0."""

    def __init__(self, learner: Learner, ranks: Ranks = ALONE) -> None:
        self._model, self._optimizer = learner.policy.model, learner.optimizer
        self._policy, self._ranks = learner.policy, ranks
        self._critic = learner.critic_state
        critic = None if self._critic is None else (self._critic[0].model, self._critic[1])
        self._saver = StateSaver(self._model, self._optimizer, ranks, critic)

    def take(self, checkpoints: Path) -> Checkpoint:
        """Copy everything as it is now, and begin to write the copy. Waits for the write before."""
        self._saver.wait()
        checkpoints.mkdir(parents=True, exist_ok=True)
        _clear(checkpoints)
        folder = Path(tempfile.mkdtemp(dir=checkpoints, prefix=_BUILDING))
        trainer: dict[str, object] = {
            "steps": _steps(self._model, self._optimizer),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        files = dict(self._policy.small_files())
        if self._critic is not None:
            body, optimizer = self._critic
            trainer["critic_steps"] = _steps(body.model, optimizer)
            files |= {f"{CRITIC}/{name}": content for name, content in body.small_files().items()}
        return Checkpoint(folder, self._saver.begin(folder), files, trainer)

    def restore(self, folder: Path) -> None:
        """Load moments and random number generators; the policy has been loaded from `folder`."""
        stored = torch.load(folder / _TRAINER, map_location="cpu", weights_only=True)
        restore_moments(self._model, self._optimizer, folder, stored["steps"], self._ranks)
        if self._critic is not None and "critic_steps" in stored:  # a fork may begin to have one
            body, optimizer = self._critic
            steps = stored["critic_steps"]
            restore_moments(body.model, optimizer, folder / CRITIC, steps, self._ranks, is_critic=True)
        torch.set_rng_state(stored["rng"])
        if stored["cuda_rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(stored["cuda_rng"])


def _steps(model: torch.nn.Module, optimizer: Adam) -> dict[str, float]:
    """Return each parameter's number of updates, where there were any."""
    states = ((name, optimizer.state.get(each)) for name, each in model.named_parameters())
    return {name: float(state["step"]) for name, state in states if state}


def write(checkpoints: Path, taken: Checkpoint, state: TrainedState, *, keep: int) -> Path:
    """Complete a checkpoint, then delete all but the newest `keep`; return its folder. `state` is that of
    when it was taken."""
    try:
        digests = taken.shards.result()
        for name, content in taken.files.items():
            (taken.folder / name).parent.mkdir(exist_ok=True)
            (taken.folder / name).write_bytes(content)
        torch.save(taken.trainer, taken.folder / _TRAINER)
        write_json(taken.folder / "state.json", asdict(state))
        write_json(taken.folder / _DIGESTS, digests | _digests(taken.folder, besides=digests))
        final = step_folder(checkpoints, state.step)
        _put_in_place(taken.folder, final)
    finally:
        shutil.rmtree(taken.folder, ignore_errors=True)
    for step in saved_steps(checkpoints)[:-keep]:
        _remove(step_folder(checkpoints, step))
    return final


def newest_intact(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that is as it was written; None where there never was one.

    Damaged ones are renamed to NAME.damaged. Raises `RuntimeFault` where all of them are damaged.
    """
    problems = []
    for step in reversed(saved_steps(checkpoints)):
        folder = step_folder(checkpoints, step)
        problem = _problem(folder)
        if problem is None:
            return folder
        problems.append(problem)
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        event(log, "checkpoint.damaged", level=logging.ERROR, problem=problem, then="the one before is used")
    if problems:
        raise RuntimeFault(
            f"no checkpoint is intact: {'; '.join(problems)}",
            "copy one from the job's `output` to its place, or start a new run",
        )
    return None


def _digests(folder: Path, besides: Collection[str] = ()) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _DIGESTS)
    names = ((str(path.relative_to(folder)), path) for path in files)
    return {name: _digest(path) for name, path in names if name not in besides}


def _digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def _problem(folder: Path) -> str | None:
    """Return what is damaged in a checkpoint. Raises `ConfigError` for one of another format."""
    try:
        written = read_json(folder / _DIGESTS)
    except RLBoostError as problem:
        return str(problem)
    if not (folder / METADATA).exists() and (folder / "optimizer.pt").exists():
        raise ConfigError(
            f"{folder} was written by an earlier version of RLBoost, in a format that is no longer read",
            f"start a new run with model: {folder}: its weights are in Hugging Face format; its moments are"
            " lost",
        )
    if written is None:
        return f"{folder / _DIGESTS} is missing"
    found = _digests(folder)
    wrong = [name for name in written if found.get(name) != written[name]]
    if not wrong:
        return None
    return f"{folder / wrong[0]} is {'damaged' if wrong[0] in found else 'missing'}"


def read_state(folder: Path) -> TrainedState:
    """Return the state that the checkpoint in `folder` was taken in."""
    return TrainedState(**(read_json(folder / "state.json") or {}))


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Give `final` the content that `write` puts into an empty folder: whole, or not at all."""
    final.parent.mkdir(parents=True, exist_ok=True)
    _clear(final.parent)
    building = Path(tempfile.mkdtemp(dir=final.parent, prefix=_BUILDING))
    try:
        write(building)
        _put_in_place(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _clear(parent: Path) -> None:
    """Delete what a killed process was building: there is one trainer."""
    for left in parent.glob(f"{_BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)


def _put_in_place(building: Path, final: Path) -> None:
    for path in sorted(building.rglob("*")):
        sync_path(path)
    sync_path(building)
    if final.exists():
        _remove(final)
    os.rename(building, final)
    sync_path(final.parent)


def _remove(folder: Path) -> None:
    """Delete so that a half-deleted folder never bears its name."""
    doomed = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_BUILDING))
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


class CheckpointWriter(BackgroundWork):
    """Writes checkpoints beside training."""

    def __init__(
        self,
        checkpoints: Path,
        take: Callable[[Path], Checkpoint],
        *,
        every_steps: int | None,
        keep: int,
        on_durable: Callable[[int], None],
    ) -> None:
        """`take`: as `TrainingState.take`. `every_steps`: None for whenever the one before is durable and the
        copies take at most `STANDSTILL` of the time. `on_durable` gets the step that a checkpoint follows."""
        super().__init__("checkpoint")
        self.last_write_s = 0.0
        """Seconds that the last finished write took; training went on meanwhile."""
        self._checkpoints = checkpoints
        self._take = take
        self._every_steps = every_steps
        self._keep = keep
        self._on_durable = on_durable
        self._taken: Checkpoint | None = None
        self._taken_at = -math.inf
        self._copy_s = 0.0

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint should follow `step`."""
        if self._every_steps is not None:
            return (step + 1) % self._every_steps == 0
        return not self.is_busy and self._copy_s <= STANDSTILL * (time.monotonic() - self._taken_at)

    def copy(self) -> None:
        """Take a checkpoint, once the one before is written: training stands still until this returns."""
        started = time.monotonic()
        self.ready()
        self._taken = self._take(self._checkpoints)
        self._taken_at = time.monotonic()
        self._copy_s = self._taken_at - started

    def submit(self, state: TrainedState) -> None:
        """Complete the checkpoint that was taken in `state`; returns at once."""
        taken, self._taken = self._taken, None
        assert taken is not None
        started = self._taken_at
        self.start(lambda: self._write(taken, state, started))

    def _write(self, taken: Checkpoint, state: TrainedState, started: float) -> None:
        write(self._checkpoints, taken, state, keep=self._keep)
        self.last_write_s = time.monotonic() - started
        event(log, "checkpoint.written", step=state.step, seconds=round(self.last_write_s, 3))
        self._on_durable(state.step)
