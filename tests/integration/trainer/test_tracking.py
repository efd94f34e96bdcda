"""Curves kept by the real W&B client where W&B cannot be reached: a run is neither ended nor held up."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from rlboost_runtime.job import Job
from rlboost_runtime.run.folder import RunFolder
from rlboost_runtime.trainer import tracking
from rlboost_runtime.trainer.tracking import Trackers

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "runs" / "r")
    found.path.mkdir(parents=True)
    return found


def job_with(tracked: dict[str, object]) -> Job:
    job = {"name": "r", "model": {"init": "tiny"}, "data": {"source": "p"}, "tracking": tracked}
    return Job.model_validate_json(json.dumps(job))


@pytest.mark.e2e  # twelve seconds
def test_wandb_that_cannot_be_reached_is_kept_for_later(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(tracking, "OPEN_S", 10.0)
    started = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        Trackers(run, job_with({"wandb": {"project": "p"}}), 0) as trackers,
    ):
        trackers.log({"step": 0.0, "reward_mean": 0.5})
    assert time.monotonic() - started < 60, "W&B would try for a minute and a half"
    assert "tracking.not_opened" in caplog.messages
    assert "tracking.switched_off" not in caplog.messages
    (kept,) = run.path.glob("wandb/offline-run-*")
    assert list(kept.glob("*.wandb")), "wandb sync can send it"


def test_a_tracker_that_cannot_begin_leaves_the_others(
    run: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    run.tensorboard.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING), Trackers(run, job_with({"tensorboard": True}), 3) as trackers:
        trackers.log({"step": 3.0, "reward_mean": 0.5})
    assert "tracking.not_opened" in caplog.messages
