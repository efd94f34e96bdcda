"""Checkpoints: everything that is needed to go on after step k as if nothing had happened.

`checkpoints/step-000012/` holds the model in HF format (float32, exactly), `optimizer.pt` (AdamW state and
random number generators), `state.json` and `digests.json`, the BLAKE3 digest of every other file. A folder of
that name is complete and durable: it is built under another name, synced and renamed. A damaged one is put
aside when a trainer starts, which goes on from the one before (`newest_intact`). Loading one on a CPU goes on
bit for bit, and on any number of ranks.
The data cursor is the step itself (`data/prompts.py`); what the window has learned is in the coordinator's
event log.

Taking a checkpoint (`take`) copies; writing it (`write`) touches nothing that training changes, so that the
two may overlap: `CheckpointWriter` writes beside training, in order. It calls `on_durable`, on its thread,
only once the checkpoint would survive a power cut; failures and bounds are those of `BackgroundWork`: memory
holds two copies at most.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from blake3 import blake3

from rlboost_runtime.errors import RLBoostError, RuntimeFault
from rlboost_runtime.logs import event
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.run.folder import read_json, sync_path, write_json
from rlboost_runtime.trainer.artifacts.publisher import BackgroundWork
from rlboost_runtime.trainer.learn.model_files import ModelSnapshot
from rlboost_runtime.trainer.learn.policy import Policy

log = logging.getLogger(__name__)

_BUILDING = ".building-"
_DIGESTS = "digests.json"


@dataclass(frozen=True, slots=True)
class TrainedState:
    """The step that a checkpoint follows, with its report, which is sent and written again if the trainer was
    killed before it could. `policy_version`: the version published after the step. `ahead`: [step, policy
    version, updates in it] of the steps that had been requested."""

    step: int
    policy_version: int
    wait_s: float
    busy_s: float
    tokens_trained: int
    reward_mean: float | None
    line: dict[str, float]
    ahead: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is written: all of it copies, in main memory."""

    model: ModelSnapshot
    optimizer: dict[str, object]
    state: TrainedState


def take(policy: Policy, optimizer: torch.optim.Optimizer, state: TrainedState) -> Checkpoint:
    """Copy everything as it is now; the policy is the one after `state.step`."""
    return Checkpoint(policy.snapshot(), _resumable(optimizer), copy.deepcopy(state))


def write(checkpoints: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`; return its folder."""

    def fill(folder: Path) -> None:
        checkpoint.model.write(folder)
        torch.save(checkpoint.optimizer, folder / "optimizer.pt")
        write_json(folder / "state.json", asdict(checkpoint.state))
        write_json(folder / _DIGESTS, _digests(folder))

    final = step_folder(checkpoints, checkpoint.state.step)
    replace_folder(final, fill)
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


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _DIGESTS)
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return hasher.hexdigest()


def _problem(folder: Path) -> str | None:
    """Return what is damaged in a checkpoint; one of an earlier version has no digests: its state must be
    readable."""
    try:
        written = read_json(folder / _DIGESTS)
        if written is None:
            read_state(folder)
            return None
    except (RLBoostError, TypeError) as problem:
        return str(problem)
    found = _digests(folder)
    wrong = [name for name in written if found.get(name) != written[name]]
    if not wrong:
        return None
    return f"{folder / wrong[0]} is {'damaged' if wrong[0] in found else 'missing'}"


def read_state(folder: Path) -> TrainedState:
    """Return the state that the checkpoint in `folder` was taken in."""
    return TrainedState(**(read_json(folder / "state.json") or {}))


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Load optimizer state and random number generators."""
    stored = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(stored["optimizer"])
    torch.set_rng_state(stored["rng"])
    if stored["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(stored["cuda_rng"])


def _resumable(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Give `final` the content that `write` puts into an empty folder: whole, or not at all."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f"{_BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)  # of a killed process: there is one trainer
    building = Path(tempfile.mkdtemp(dir=final.parent, prefix=_BUILDING))
    try:
        write(building)
        for path in sorted(building.rglob("*")):
            sync_path(path)
        sync_path(building)
        if final.exists():
            _remove(final)
        os.rename(building, final)
        sync_path(final.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Delete so that a half-deleted folder never bears its name."""
    doomed = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_BUILDING))
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


class CheckpointWriter(BackgroundWork):
    """Writes checkpoints beside training."""

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
        write(self._checkpoints, taken, keep=self._keep)
        self.last_write_s = time.monotonic() - started
        event(log, "checkpoint.written", step=taken.state.step, seconds=round(self.last_write_s, 3))
        self._on_durable(taken.state.step)
