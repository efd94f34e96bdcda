"""Not a test: ranks that train and save, or resume, as `test_checkpoints_on_a_slow_disk.py` judges.

`python checkpoint_steps.py FOLDER train|resume` (with torchrun's environment). The disk is emulated: each
piece of a checkpoint sleeps for its time at `DISK_BYTES_PER_S` while it holds a lock that all ranks share.
"""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlboost_runtime.job import Algorithm, TinyModel, Trainer
from rlboost_runtime.run.checkpoints import saved_steps
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import CheckpointWriter, TrainedState, TrainingState
from rlboost_runtime.trainer.learn import sharded_state
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy, Residency
from rlboost_runtime.trainer.learn.rank_worker import serve
from rlboost_runtime.trainer.learn.ranks import MOMENTS, End, Ranks, local_part
from rlboost_runtime.trainer.learn.sample import Sample
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

DISK_BYTES_PER_S = 50e6
WARM_STEPS, SAVES = 2, 3
MODEL = TinyModel(init="tiny", hidden_size=1024, num_layers=2)
ALGORITHM = Algorithm(learning_rate=1e-3, learning_rate_warmup_steps=0, max_response_tokens=8)


def samples(step: int) -> list[Sample]:
    draw = np.random.default_rng(step)
    return [
        Sample.of(
            draw.integers(0, 256, 4).tolist(), draw.integers(0, 256, 6).tolist(),
            draw.normal(-5.5, 0.2, 6).tolist(), float(draw.normal()),
        )
        for _ in range(8)
    ]  # fmt: skip


def train(learner: Learner, step: int) -> float:
    learner.begin_step(step)
    learner.accumulate(samples(step))
    learner.apply()
    return learner.sums.metrics()["loss"]


def rows(learner: Learner) -> dict[str, torch.Tensor]:
    """This rank's rows of weights and moments."""
    learner.policy.model.state_dict()  # FSDP: back to shards
    found = {}
    for name, parameter in learner.policy.model.named_parameters():
        found[f"model.{name}"] = local_part(parameter.detach())
        for kind in MOMENTS:
            found[f"{kind}.{name}"] = local_part(learner.optimizer.state[parameter][kind])
    return found


def slow_disk(lock: Path) -> None:
    write = sharded_state._HashedFile.write_piece

    def slowly(self: Any, piece: memoryview) -> None:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            write(self, piece)
            time.sleep(len(piece) / DISK_BYTES_PER_S)

    sharded_state._HashedFile.write_piece = slowly  # type: ignore[method-assign]


def keep_truth(learner: Learner, ranks: Ranks, folder: Path) -> None:
    """Each rank but the first, which is measured, writes its rows at each checkpoint."""
    begin, number = sharded_state.StateSaver.begin, iter(range(1000))

    def noting(self: Any, building: Path) -> Any:
        if not ranks.leads:
            torch.save(rows(learner), folder / f"truth-{next(number)}-{ranks.rank}.pt")
        return begin(self, building)

    sharded_state.StateSaver.begin = noting  # type: ignore[method-assign]


class Memory:
    """The most that this process had in memory that is no file's."""

    def __init__(self) -> None:
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            (line,) = (each for each in status.splitlines() if each.startswith("RssAnon"))
            self.peak = max(self.peak, 1024 * int(line.split()[1]))
            time.sleep(0.005)


def lead(learner: Learner, ranks: Ranks, folder: Path) -> None:
    """Train on until `SAVES` checkpoints are durable, as the clock allows; then wait for the kill in one."""
    checkpoints, losses, stood_still, saved = folder / "checkpoints", {}, 0.0, dict[int, int]()
    memory = Memory()
    state = TrainingState(learner, ranks)
    writer = CheckpointWriter(checkpoints, state.take, every_steps=None, keep=2, on_durable=lambda step: None)
    for step in range(WARM_STEPS):
        losses[step] = train(learner, step)
    shard = sum(each.nbytes for each in rows(learner).values())
    torch.save(rows(learner), folder / "truth-0-0.pt")
    memory.peak = 0  # the first one alone: what a step allocates comes and goes by the same amount
    time.sleep(0.5)
    before = memory.peak
    writer.copy()
    writer.submit(TrainedState(WARM_STEPS - 1, 0, 0.0, 0.0, 0, 0.0, {}))
    writer.ready()
    extra, saved[WARM_STEPS - 1] = memory.peak - before, 0
    started, write_s, step = time.monotonic(), [], WARM_STEPS
    while len(saved) < SAVES or writer.is_busy:
        losses[step] = train(learner, step)
        if len(saved) < SAVES and writer.is_due(step):
            write_s.append(writer.last_write_s)
            torch.save(rows(learner), folder / f"truth-{len(saved)}-0.pt")
            at = time.monotonic()
            writer.copy()
            writer.submit(TrainedState(step, 0, 0.0, 0.0, 0, 0.0, {}))
            stood_still += time.monotonic() - at
            saved[step] = len(saved)
        step += 1
    total = time.monotonic() - started
    writer.ready()
    writer.copy()  # the one that is killed
    time.sleep(1.0)
    (building,) = checkpoints.glob(".building-*")
    found = {
        "losses": losses, "saved": saved, "stood_still_share": stood_still / total, "steps": step,
        "seconds": total, "write_s": [*write_s[1:], writer.last_write_s], "shard_bytes": shard,
        "extra_bytes": extra,
        "half_written": sum(each.stat().st_size for each in building.iterdir()),
    }  # fmt: skip
    (folder / "found.json").write_text(json.dumps(found))
    time.sleep(600)


def resume(learner: Learner, ranks: Ranks, folder: Path) -> None:
    """Go on from the newest checkpoint: each rank writes what it has, rank 0 the next step's loss."""
    newest = checkpoint.newest_intact(folder / "checkpoints")
    assert newest is not None
    TrainingState(learner, ranks).restore(newest)
    next_step = saved_steps(folder / "checkpoints")[-1] + 1
    found = {"step": next_step - 1, "loss": train(learner, next_step)}
    (folder / f"resumed-{ranks.num}.json").write_text(json.dumps(found))
    ranks.broadcast(End())


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    ranks, trainer = Ranks.join(), Trainer()
    slow_disk(folder / "lock")
    if what == "resume":
        policy = Policy.load(max((folder / "checkpoints").glob("step-*")), ranks)
    else:
        policy = Policy(make_model(MODEL, 64), make_tokenizer())
    policy.set_up(trainer, ALGORITHM, ranks)
    learner = Learner(policy, ALGORITHM, trainer, ranks)
    if what == "resume":
        restored = sharded_state.restore_moments

        def noting(*arguments: Any, **options: Any) -> None:
            restored(*arguments, **options)
            torch.save(rows(learner), folder / f"resumed-{ranks.num}-{ranks.rank}.pt")

        for module in (checkpoint, sys.modules["rlboost_runtime.trainer.learn.rank_worker"]):
            module.restore_moments = noting  # type: ignore[attr-defined]
    else:
        keep_truth(learner, ranks, folder)
    if not ranks.leads:
        serve(ranks, policy, learner, Residency(policy, learner.optimizer))
    else:
        {"train": lead, "resume": resume}[what](learner, ranks, folder)
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
