"""The TRL example says that a step is trained once that would survive a crash, and comes back from one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl" / "train.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trl_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_checkpoint_that_was_cut_off_is_not_resumed_from(example: ModuleType, tmp_path: Path) -> None:
    assert example.newest_whole(tmp_path) is None
    for number in (9, 10, 11):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
        if number < 11:
            (folder / "trainer_state.json").write_text("{}")
    assert example.newest_whole(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_step_is_trained_once_it_is_saved(example: ModuleType) -> None:
    said: list[Any] = []
    fleet = SimpleNamespace(
        job=SimpleNamespace(algorithm=SimpleNamespace(group_size=4)),
        trained=lambda step, **numbers: said.append((step, numbers["reward_mean"])),
    )
    rollout, state = example.FleetRollout(fleet), SimpleNamespace(global_step=1)
    rollout.on_log(None, state, None, {"reward": 0.5, "loss": 0.1})
    assert not said
    rollout.on_save(None, state, None)
    rollout.on_log(None, state, None, {"train_runtime": 3.0})
    assert said == [(0, 0.5)]
