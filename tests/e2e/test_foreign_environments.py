"""Tasksets of verifiers and games of TextArena behind OpenEnv train the tiny model, with the real packages in
Python environments of their own (`make environments`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlboost_runtime.audit.run import audit
from rlboost_runtime.job.environment import VerifiersTaskset
from rlboost_runtime.trainer.episodes.taskset import task_rows

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
VERIFIERS = ROOT / ".venv-verifiers" / "bin" / "python"
OPENENV = ROOT / ".venv-openenv" / "bin" / "python"


def small(cli: Any, example: str, **environment: Any) -> Path:
    """Copy an example; four steps of 16 episodes."""
    folder = cli.home / example
    shutil.copytree(ROOT / "examples" / example, folder)
    path: Path = folder / "job.yaml"
    yaml = YAML(typ="safe")
    fields = yaml.load(path)
    fields["environment"] |= environment
    fields["algorithm"] |= {"steps": 3, "group_size": 4, "prompts_per_step": 4, "minibatches_per_step": 1}
    fields["evidence"] = {"keep_journal": True, "count_tokens": True}
    with path.open("w") as file:
        yaml.dump(fields, file)
    return path


@pytest.mark.parametrize(
    ("example", "environment"),
    [
        ("verifiers", {"verifiers": {"taskset": "guess_taskset", "python": str(VERIFIERS)}}),
        ("textarena", {"openenv": {"command": [str(OPENENV), "server.py", "{port}"]}}),
    ],
)
def test_a_foreign_environment_trains_through_a_kill(
    cli: Any, example: str, environment: dict[str, Any]
) -> None:
    path = small(cli, example, **environment)
    cli("launch", path, "--yes", "--detach")
    cli.wait(example, lambda s: s["step"] >= 1, timeout_s=400)
    for machine in cli.processes(example, "rlboost_runtime.agent")[:1]:
        machine.kill()
    assert cli.wait_outcome(example, timeout_s=400)["exit_code"] == 0
    found = [json.loads(line) for line in cli.run_folder(example).metrics.read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 1, 2]
    for line in found:
        assert line["turns_mean"] > 1
        assert line["mismatch_kl"] < 1e-6, "trained after exactly the tokens that it was sampled after"
        assert sum(line[name] for name in line if name.startswith("episodes_left_out")) == 0
    assert any(line["reward_mean"] > 0 for line in found)
    assert audit(cli.run_folder(example)).problems == []


def test_the_example_has_the_tasks_of_its_taskset() -> None:
    folder = ROOT / "examples" / "verifiers"
    rows = list(task_rows(VerifiersTaskset(taskset="guess_taskset"), folder, 90, VERIFIERS))
    assert rows == (folder / "tasks.jsonl").read_text().splitlines()
