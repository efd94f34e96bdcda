"""The example with a reward of its own: measured by a probe, and the plan that its figures make possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlboost_cli.planning.agreement import PROBE_STEPS

pytestmark = pytest.mark.e2e

OWN = Path(__file__).parents[2] / "examples" / "own_reward"


def shortened(home: Path) -> Path:
    """Copy the example; the same task in small steps, and no market."""
    folder = home / "own_reward"
    shutil.copytree(OWN, folder)
    path = folder / "job.yaml"
    fields = YAML(typ="safe").load(path)
    fields["model"]["warmup"] = {"reward": 0.05, "max_seconds": 20}
    fields["algorithm"] |= {"prompts_per_step": 4, "group_size": 4}
    fields["rollout"]["spot"]["any_of"][0].pop("market")
    with path.open("w") as file:
        YAML().dump(fields, file)
    return path


def test_own_reward_is_measured_by_a_probe_and_planned_from_it(cli: Any) -> None:
    path = shortened(cli.home)
    before = cli.json("plan", str(path))["forecast"]
    assert "own-reward-probe" not in before["basis"]
    done = cli("plan", path, "--probe", "--json", timeout_s=240)
    assert "probe: 4 steps of this job as run own-reward-probe" in done.stderr
    status = cli.json("status", "own-reward-probe")
    assert (status["state"], status["step"]) == ("done", PROBE_STEPS)
    assert all(0 <= reward <= 1 for reward in status["reward_history"])
    metrics = [line for line in cli.run_folder("own-reward-probe").metrics.read_text().splitlines() if line]
    assert len(metrics) == PROBE_STEPS
    assert all('"reward_failures_raised": 0.0' in line for line in metrics)

    found = cli.json("plan", str(path))["forecast"]
    assert found == json.loads(done.stdout)["forecast"]
    assert "run own-reward-probe" in found["basis"]
    assert f"calibrated with {PROBE_STEPS - 1} measured steps" in found["basis"]
    assert found["hours"]["mean"] > 0
    assert found["hours"] != before["hours"], "the same simulation at measured rates"
    cli.assert_gone("own-reward-probe")
