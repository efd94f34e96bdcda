"""Checkpoints written beside training: in order, said once durable, mistakes said in the training thread."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlboost_runtime.errors import ConfigError, RuntimeFault
from rlboost_runtime.job import Algorithm, TinyModel
from rlboost_runtime.run import paced_file
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import (
    STANDSTILL,
    CheckpointWriter,
    TrainedState,
    TrainingState,
)
from rlboost_runtime.trainer.learn.learner import Learner
from rlboost_runtime.trainer.learn.policy import Policy
from rlboost_runtime.trainer.models.tiny import make_model, make_tokenizer
from tests.fakes.damage import spoil


@pytest.fixture(scope="module")
def training() -> TrainingState:
    model = make_model(TinyModel(init="tiny", hidden_size=32, num_layers=1), 32)
    return TrainingState(Learner(Policy(model, make_tokenizer()), Algorithm()))


def state(step: int) -> TrainedState:
    return TrainedState(step, step + 1, 0.0, 0.0, 1, 0.5, {"step": float(step)})


def write(checkpoints: Path, training: TrainingState, step: int) -> Path:
    return checkpoint.write(checkpoints, training.take(checkpoints), state(step), keep=2)


def writer(checkpoints: Path, training: TrainingState, said: Callable[[int], None]) -> CheckpointWriter:
    return CheckpointWriter(checkpoints, training.take, every_steps=1, keep=2, on_durable=said)


def save(into: CheckpointWriter, step: int) -> None:
    into.copy()
    into.submit(state(step))


def test_a_checkpoint_is_said_once_it_is_complete_and_training_goes_on_meanwhile(
    tmp_path: Path, training: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, durable = threading.Event(), []
    sync = os.fdatasync

    def slowly(descriptor: int) -> None:
        assert may_go_on.wait(10)
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", slowly)

    def said(step: int) -> None:
        durable.append((step, saved_steps(tmp_path)))

    with writer(tmp_path, training, said) as found:
        save(found, 0)  # returns although nothing is written yet
        assert durable == []
        assert found.is_busy
        may_go_on.set()
        for step in (1, 2):
            save(found, step)
    assert durable == [(0, [0]), (1, [0, 1]), (2, [1, 2])]
    assert found.last_write_s > 0


def test_what_goes_wrong_is_raised_at_the_next_checkpoint_and_nothing_is_said(
    tmp_path: Path, training: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    durable: list[int] = []
    with writer(tmp_path, training, durable.append) as found:
        save(found, 0)
        with pytest.raises(OSError, match="No space left"):
            found.copy()
    with pytest.raises(OSError, match="No space left"), writer(tmp_path, training, durable.append) as last:
        save(last, 2)  # the last one's mistake is raised at the end
    assert durable == []
    assert saved_steps(tmp_path) == []


def test_left_to_itself_it_saves_when_the_disk_and_the_clock_allow_it(
    tmp_path: Path, training: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, copies_take = [0.0], 1.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])

    def take(checkpoints: Path) -> checkpoint.Checkpoint:
        now[0] += copies_take
        return training.take(checkpoints)

    with CheckpointWriter(tmp_path, take, every_steps=None, keep=2, on_durable=lambda step: None) as found:
        assert found.is_due(0), "a run begins with one"
        save(found, 0)
        found.ready()
        now[0] += 0.99 * copies_take / STANDSTILL
        assert not found.is_due(1)
        now[0] += 0.02 * copies_take / STANDSTILL
        assert found.is_due(2)
        monkeypatch.setattr(CheckpointWriter, "is_busy", True)
        assert not found.is_due(2), "the disk is not done with the one before"


def test_other_files_never_wait_for_a_whole_checkpoint(
    tmp_path: Path, training: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the disk is bounded, whatever the size of a tensor."""
    waiting, most = dict[int, int](), [0]
    write_piece, write_out = paced_file.PacedFile.write_piece, paced_file._write_out
    sync = os.fdatasync

    def noting(self: paced_file.PacedFile, piece: memoryview) -> None:
        waiting[self.fileno()] = waiting.get(self.fileno(), 0) + len(piece)
        most[0] = max(most[0], *waiting.values())
        write_piece(self, piece)

    def written(descriptor: int, start: int, num_bytes: int) -> None:
        waiting[descriptor] -= num_bytes
        write_out(descriptor, start, num_bytes)

    def synced(descriptor: int) -> None:
        assert waiting.pop(descriptor) == 0, "the rest is written out before"
        sync(descriptor)

    monkeypatch.setattr(paced_file, "LEAST_BYTES", 500)
    monkeypatch.setattr(paced_file, "MOST_BYTES", 1000)
    monkeypatch.setattr(paced_file, "FIRST_BYTES", 700)
    monkeypatch.setattr(paced_file, "_paces", {})
    monkeypatch.setattr(paced_file.PacedFile, "write_piece", noting)
    monkeypatch.setattr(paced_file, "_write_out", written)
    monkeypatch.setattr(paced_file.os, "fdatasync", synced)
    folder = write(tmp_path, training, 0)
    assert (folder / "__0_0.distcp").stat().st_size > 20_000
    assert 0 < most[0] <= 1000
    assert not waiting, "all is durable in the end"


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("__0_0.distcp", damaged),
        (".metadata", damaged),
        ("trainer.pt", damaged),
        ("state.json", damaged),
        ("config.json", damaged),
        ("digests.json", damaged),
        ("state.json", lambda path: path.write_bytes(path.read_bytes()[:20])),
        ("__0_0.distcp", lambda path: path.unlink()),
        ("digests.json", lambda path: path.unlink()),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(
    tmp_path: Path,
    training: TrainingState,
    name: str,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert checkpoint.newest_intact(tmp_path) is None
    for step in (1, 2):
        write(tmp_path, training, step)
    newest, before = (step_folder(tmp_path, step) for step in (2, 1))
    assert checkpoint.newest_intact(tmp_path) == newest
    damage(newest / name)
    assert checkpoint.newest_intact(tmp_path) == before
    assert str(newest) in str([record.__dict__ for record in caplog.records])
    assert saved_steps(tmp_path) == [1]
    damage(before / name)
    with pytest.raises(RuntimeFault, match="no checkpoint is intact"):
        checkpoint.newest_intact(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_refused_with_what_to_do(
    tmp_path: Path, training: TrainingState
) -> None:
    folder = write(tmp_path, training, 2)
    for name in (".metadata", "__0_0.distcp", "digests.json"):
        (folder / name).unlink()
    (folder / "optimizer.pt").write_bytes(b"moments")
    with pytest.raises(ConfigError, match="earlier version") as caught:
        checkpoint.newest_intact(tmp_path)
    assert f"model: {folder}" in caught.value.remedy


FLIPS = int(os.environ.get("RLBOOST_FLIPS", "4"))


def test_no_damage_of_a_checkpoint_is_resumed_from(tmp_path: Path, training: TrainingState) -> None:
    """Seeded; FLIPS tries per file (`make soak-corruption`)."""
    for step in (0, 1):
        write(tmp_path, training, step)
    before, newest = (step_folder(tmp_path, step) for step in (0, 1))
    rng, intact, found = random.Random(23), tmp_path / "intact", 0
    shutil.copytree(newest, intact)
    content = {path.name: path.read_bytes() for path in intact.iterdir()}
    for name in sorted(content) * FLIPS:
        shutil.rmtree(newest, ignore_errors=True)
        shutil.copytree(intact, newest)
        spoil(newest / name, rng)
        if checkpoint.newest_intact(tmp_path) == before:
            found += 1
        else:
            served = {path.name: path.read_bytes() for path in newest.iterdir()}
            assert served | {"digests.json": b""} == content | {"digests.json": b""}, name
        for aside in tmp_path.glob("*damaged*"):
            shutil.rmtree(aside)
    print(json.dumps({"pass": True, "files": sorted(content), "flips": FLIPS * len(content), "found": found}))


def test_beside_a_gpu_writing_a_checkpoint_never_touches_it(
    tmp_path: Path, training: TrainingState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes has GPU 0 as its device, whatever its rank's is: a context costs 0.5 GB."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a stream on the GPU")

    save(into := writer(tmp_path, training, lambda _: None), 0)  # modules are imported without a GPU
    into.ready()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)
    write(tmp_path, training, 1)
    assert checkpoint.newest_intact(tmp_path) == tmp_path / "step-000001"
