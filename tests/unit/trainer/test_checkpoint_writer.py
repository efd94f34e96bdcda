"""Checkpoints written beside training: in order, said once durable, mistakes said in the training thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import Checkpoint, CheckpointWriter, TrainedState
from rlboost_runtime.trainer.learn.model_files import ModelSnapshot


def taken(step: int) -> Checkpoint:
    state = TrainedState(step, step + 1, 0.0, 0.0, 1, 0.5, {"step": float(step)})
    return Checkpoint(ModelSnapshot({}, {"config.json": b"{}"}), {}, state)


def test_a_checkpoint_is_said_once_it_is_complete_and_training_goes_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, durable = threading.Event(), []
    replace_folder = checkpoint.replace_folder

    def slowly(*arguments):
        assert may_go_on.wait(10)
        replace_folder(*arguments)

    monkeypatch.setattr(checkpoint, "replace_folder", slowly)

    def said(step: int) -> None:
        durable.append((step, checkpoint.saved_steps(tmp_path)))

    with CheckpointWriter(tmp_path, keep=2, on_durable=said) as writer:
        writer.submit(taken(0))  # returns although nothing is written yet
        assert durable == []
        may_go_on.set()
        for step in (1, 2):
            writer.submit(taken(step))
    assert durable == [(0, [0]), (1, [0, 1]), (2, [1, 2])]
    assert writer.last_write_s > 0


def test_what_goes_wrong_is_raised_at_the_next_checkpoint_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "replace_folder", full)
    durable: list[int] = []
    with CheckpointWriter(tmp_path, keep=2, on_durable=durable.append) as writer:
        writer.submit(taken(0))
        with pytest.raises(OSError, match="No space left"):
            writer.submit(taken(1))
    with pytest.raises(OSError, match="No space left"):  # the last one's mistake is raised at the end
        write_one(CheckpointWriter(tmp_path, keep=2, on_durable=durable.append))
    assert durable == []


def write_one(writer: CheckpointWriter) -> None:
    with writer:
        writer.submit(taken(2))
