"""A run begins with what the last one like it measured: live, through the command line."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost_runtime.coordinator.storage.journal import read_events
from rlboost_runtime.core.base.messages import RunStarted
from rlboost_runtime.run.folder import RunFolder

pytestmark = pytest.mark.e2e

SMALL: dict[str, Any] = {
    "model": {"init": "tiny", "warmup": None},
    "algorithm": {"prompts_per_step": 8, "group_size": 2, "max_response_tokens": 32},
    "rollout": {"spot": {"max_instances": 1}},
}


def begun_with(run: RunFolder) -> RunStarted:
    first = next(iter(read_events(run.events)))
    assert isinstance(first, RunStarted)
    return first


def test_a_second_run_begins_with_what_the_first_measured(cli: Any) -> None:
    for name, steps in (("first", 3), ("second", 1)):
        job = {**SMALL, "algorithm": {**SMALL["algorithm"], "steps": steps}}
        cli("launch", cli.job(name, **job), "--yes", "--detach")
        assert cli.wait_outcome(name, timeout_s=200)["exit_code"] == 0
    first, second = (begun_with(cli.run_folder(name)) for name in ("first", "second"))
    assert first.prior is None
    assert second.prior is not None
    assert second.prior.num_steps >= 1
    assert max(second.prior.lengths) <= 32
    assert second.prior.window.train_s_per_token
    assert second.prior.version_bytes > 0
    told = [event["text"] for event in cli.json("status", "second")["events"]]
    assert any("begins with what first measured" in text for text in told), told
