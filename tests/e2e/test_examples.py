"""The example with a reward of its own, cut to a few steps, and the plan that its figures make possible."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OWN = Path(__file__).parents[2] / "examples" / "own_reward"
STEPS = 4


def shortened(home: Path) -> Path:
    """Copy the example; the same task, but as few steps as a plan needs, and no market."""
    folder = home / "own_reward"
    shutil.copytree(OWN, folder)
    path = folder / "job.yaml"
    fields = YAML(typ="safe").load(path)
    fields["model"]["warmup"] = {"reward": 0.05, "max_seconds": 20}
    fields["algorithm"] |= {"steps": STEPS, "prompts_per_step": 4, "group_size": 4}
    fields["rollout"]["spot"]["any_of"][0].pop("market")
    with path.open("w") as file:
        YAML().dump(fields, file)
    return path


def test_own_reward_runs_and_is_the_basis_of_a_plan(cli: Any) -> None:
    path = shortened(cli.home)
    assert cli.json("plan", str(path))["forecast"] is None
    cli("launch", path, "--yes", timeout_s=240)
    status = cli.json("status", "own-reward")
    assert (status["state"], status["step"]) == ("done", STEPS)
    assert all(0 <= reward <= 1 for reward in status["reward_history"])
    metrics = [line for line in cli.run_folder("own-reward").metrics.read_text().splitlines() if line]
    assert len(metrics) == STEPS
    assert all('"reward_failures_raised": 0.0' in line for line in metrics)

    found = cli.json("plan", str(path))["forecast"]
    assert "run own-reward" in found["basis"]
    measured = found["measured"]
    assert measured["num_steps"] == STEPS - 1
    assert measured["step_s"] > 0
    assert measured["train_s_per_token"] > 0
    assert found["useful_instances"] <= 1
    assert found["rows"], "at least one of the pools generated something"
    assert found["rows"][0]["step_s"] > measured["overhead_s"]
    assert cli.processes("own-reward") == []
