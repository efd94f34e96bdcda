"""`rlboost acceptance` in the lab: whole, through both sellers, and killed at random moments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from bought_heads import PRICE, all_gone, said_there
from cloudlab import catalogue
from cloudlab.client import Lab
from ruamel.yaml import YAML

from rlboost_cli.acceptance.steps import CLEANING, STEPS
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000, func_only=True)]
KILLS = int(os.environ.get("RLBOOST_ACCEPTANCE_KILLS", "3"))
SEED = int(os.environ.get("RLBOOST_ACCEPTANCE_SEED", "1"))
WHOLE_S = 900.0
"""A trial in the lab, on two busy cores."""
ENDS_ITSELF_S = 600.0
"""From a kill until the machines are gone by themselves: five idle minutes, and the end of a run."""
MAX_USD = 5.0
NO_GPU = {"driver"}
"""What the lab cannot show."""
BEHIND = {"ports"}
"""Its machines have no firewall, and are reached by their private addresses."""
SPOT = {"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct", "max_price_usd_per_hour": 0.5}


def changes_for(laptop: Cli, api: str, **trainer: Any) -> Path:
    """Write what has to differ in the lab: its machine type, CPUs, a model that two cores can train."""
    path = laptop.home / "lab.yaml"
    changes = {
        "model": {"init": "tiny"},
        "data": {
            "reasoning_gym": ["spell_backward"],
            "size": 64,
            "config": {"min_word_len": 3, "max_word_len": 8},
            "chat_template": None,
        },
        "algorithm": {
            "group_size": 4,
            "prompts_per_step": 6,
            "max_prompt_tokens": 128,
            "max_response_tokens": 24,
            "micro_batch_responses": 4,
            "learning_rate": 1.0e-4,
        },
        "trainer": {
            "accelerators": "A10G:1",
            "allow_cpu": True,
            "private_address": True,
            "disk_gb": None,
            "role": None,
            **trainer,
        },
        "rollout": {
            "engine": "transformers",
            "engine_args": {
                "dtype": None,
                "gpu_memory_utilization": None,
                "max_running": 4,
                "tokens_per_s_per_response": 12,
            },
            "spot": {"any_of": [SPOT]},
        },
        "env": {"AWS_ENDPOINT_URL": api, "AWS_REGION": "us-east-1"},
        "secrets": None if trainer.get("role") else ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
    }
    with path.open("w") as file:
        YAML().dump(changes, file)
    return path


def arguments(laptop: Cli, changes: Path, *more: str) -> list[str | Path]:
    report = laptop.home / "report"
    return ["acceptance", "aws/us-east-1", "--yes", "--with", changes, "--output", report, *more]


def report_of(laptop: Cli) -> dict[str, Any]:
    return json.loads((laptop.home / "report.json").read_text())


def check_report(laptop: Cli, lab: Lab, before: int) -> None:
    """Every step passed but those that the lab cannot show; nothing is left; no secret is in it."""
    report = report_of(laptop)
    steps = {step["step"]: step for step in report["steps"]}
    assert list(steps) == [step.name for step in (*STEPS, *CLEANING)]
    results = {name: (step["result"], step["found"]) for name, step in steps.items()}
    not_passed = {name for name, (result, _) in results.items() if result != "passed"}
    assert not_passed == NO_GPU | BEHIND, {name: results[name] for name in not_passed}
    assert results["driver"] == ("not checked", "not checked here: no GPU")
    assert "step 10" in results["ten steps"][1] or results["ten steps"][1].startswith("10 steps")
    assert len(lab.machines()) >= before + 3, "a head and two spot machines"
    assert all_gone(lab), lab.machines()
    check_budget(lab, before)
    text = (laptop.home / "report.md").read_text() + (laptop.home / "report.json").read_text()
    for secret in ("lab-secret", catalogue.SECRET_KEY, "10.231.", str(Path.home()) + "/"):
        assert secret not in text, f"{secret} is in the report"
    print(text)


def check_budget(lab: Lab, before: int) -> None:
    """By the lab's own clock, at the prices that its machines have."""
    spent = sum(
        (machine["ended_at"] - machine["launched_at"]) / 3600 * (SPOT_PRICE if machine["is_spot"] else PRICE)
        for machine in lab.machines()[before:]
    )
    assert spent <= MAX_USD, spent


SPOT_PRICE = 0.5


def test_direct_every_step_passes_that_needs_no_gpu(lab: Lab, api: str, laptop: Cli) -> None:
    before = len(lab.machines())
    try:
        laptop(*arguments(laptop, changes_for(laptop, api)), timeout_s=WHOLE_S)
    except AssertionError:
        print(said_there(lab, before))
        raise
    check_report(laptop, lab, before)
