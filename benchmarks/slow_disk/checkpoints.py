"""Writes one checkpoint after another into a folder, as the trainer does: `python -m
benchmarks.slow_disk.checkpoints FOLDER`. A line for each on standard output; ends with its standard input."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

from rlboost_runtime.job import Algorithm, TinyModel, Trainer
from rlboost_runtime.trainer.artifacts.checkpoint import CheckpointWriter, TrainedState, TrainingState
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.learn.ranks import ALONE
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer

MODEL = TinyModel(init="tiny", hidden_size=1024, num_layers=5)
"""50 M parameters: a checkpoint of 600 MB."""


def make_learner(model: TinyModel) -> Learner:
    """Return a learner whose optimizer has its moments."""
    trainer, algorithm = Trainer(), Algorithm(learning_rate=1e-4, learning_rate_warmup_steps=0)
    policy = Policy(make_model(model, 64), make_tokenizer())
    policy.set_up(trainer, algorithm, ALONE)
    learner = Learner(policy, algorithm, trainer, ALONE)
    for parameter in policy.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return learner


def main(folder: Path) -> None:
    """Write until standard input ends."""
    torch.set_num_threads(1)
    state = TrainingState(make_learner(MODEL), ALONE)
    writer = CheckpointWriter(folder, state.take, every_steps=1, keep=1, on_durable=lambda step: None)
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    for step in range(1_000_000):
        began = time.time()
        writer.copy()
        writer.submit(TrainedState(step, 0, 0.0, 0.0, 0, 0.0, {}))
        writer.ready()
        size = sum(path.stat().st_size for path in (folder / f"step-{step:06d}").iterdir())
        print(json.dumps({"began": began, "ended": time.time(), "num_bytes": size}), flush=True)
        if stop.wait(1.0):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
