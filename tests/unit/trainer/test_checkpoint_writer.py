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

from rlboost_runtime.errors import RuntimeFault
from rlboost_runtime.run.checkpoints import saved_steps, step_folder
from rlboost_runtime.trainer.artifacts import checkpoint
from rlboost_runtime.trainer.artifacts.checkpoint import Checkpoint, CheckpointWriter, TrainedState
from rlboost_runtime.trainer.learn.model_files import ModelSnapshot
from tests.fakes.damage import spoil


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
        durable.append((step, saved_steps(tmp_path)))

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


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("optimizer.pt", damaged),
        ("state.json", damaged),
        ("config.json", damaged),
        ("digests.json", damaged),
        ("state.json", lambda path: path.write_bytes(path.read_bytes()[:20])),
        ("optimizer.pt", lambda path: path.unlink()),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert checkpoint.newest_intact(tmp_path) is None
    for step in (1, 2):
        checkpoint.write(tmp_path, taken(step), keep=2)
    newest, before = (step_folder(tmp_path, step) for step in (2, 1))
    assert checkpoint.newest_intact(tmp_path) == newest
    damage(newest / name)
    assert checkpoint.newest_intact(tmp_path) == before
    assert str(newest) in str([record.__dict__ for record in caplog.records])
    assert saved_steps(tmp_path) == [1]
    damage(before / name)
    with pytest.raises(RuntimeFault, match="no checkpoint is intact"):
        checkpoint.newest_intact(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_used_if_its_state_can_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        (checkpoint.write(tmp_path, taken(step), keep=2) / "digests.json").unlink()
    assert checkpoint.newest_intact(tmp_path) == step_folder(tmp_path, 2)
    (step_folder(tmp_path, 2) / "state.json").write_bytes(b'{"step')
    assert checkpoint.newest_intact(tmp_path) == step_folder(tmp_path, 1)


def write_one(writer: CheckpointWriter) -> None:
    with writer:
        writer.submit(taken(2))


FLIPS = int(os.environ.get("RLBOOST_FLIPS", "4"))


def test_no_damage_of_a_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    """Seeded; FLIPS tries per file (`make soak-corruption`)."""
    for step in (0, 1):
        checkpoint.write(tmp_path, taken(step), keep=2)
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
