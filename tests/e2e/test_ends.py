"""How a whole run ends when one of its clouds cannot be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.e2e_rig import Cli

pytestmark = pytest.mark.e2e

CLOUD: dict[str, Any] = {
    "algorithm": {"steps": 2},
    "trainer": {"infra": "local", "address": "203.0.113.7"},
    "rollout": {
        "engine_args": {"tokens_per_s_per_response": 60},
        "spot": {"any_of": [{"infra": "aws/us-east-1", "accelerators": "H100:8", "via": "direct"}]},
    },
}


def test_a_trained_run_is_done_though_its_cloud_has_no_credentials(cli: Cli, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    for name in [name for name in cli.environment if name.startswith("AWS_")]:
        del cli.environment[name]
    cli.environment |= {
        "AWS_SHARED_CREDENTIALS_FILE": absent,
        "AWS_CONFIG_FILE": absent,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    shown = cli("launch", cli.job("ends", **CLOUD), "--yes")
    run = cli.run_folder("ends")
    outcome = json.loads(run.outcome.read_bytes())
    assert (outcome["state"], outcome["exit_code"], outcome["warning"]) == ("done", 0, "")
    assert "ends is done: 2 of 2 steps" in shown.stdout
    assert "{" not in shown.stdout + shown.stderr
    assert "warning" not in shown.stderr, "nothing was ever launched there"
    cli.assert_gone("ends")
    assert "nothing of ends is still running" in cli("down", "ends", "--yes").stderr
