"""`rlboost acceptance` in the lab: whole, through both sellers, and killed at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bought_heads import PRICE, all_gone, said_there, until
from cloudlab import catalogue
from cloudlab.client import Lab
from metadata_service import start_metadata_service
from ruamel.yaml import YAML

from rlboost_cli.acceptance.steps import CLEANING, STEPS
from tests.e2e.conftest import Cli

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000, func_only=True)]
KILLS = int(os.environ.get("RLBOOST_ACCEPTANCE_KILLS", "3"))
SEED = int(os.environ.get("RLBOOST_ACCEPTANCE_SEED", "1"))
WHOLE_S = 900.0
"""A trial in the lab, on two busy cores."""
IDLE_MINUTES = 2.0
ENDS_ITSELF_S = 600.0
"""From a kill until the machines are gone by themselves: the end of the run, then two idle minutes."""
KILLED_BY_S = float(os.environ.get("RLBOOST_ACCEPTANCE_KILLED_BY_S", "180"))
"""Kills fall anywhere in this time of a trial."""
MAX_USD = 5.0
NO_GPU = {"driver"}
"""What the lab cannot show."""
BEHIND = {"ports"}
"""Its machines have no firewall, and are reached by their private addresses."""
SPOT = {"infra": "aws/us-east-1", "accelerators": "A10G:1", "via": "direct", "max_price_usd_per_hour": 0.5}


SPOT_PRICE = 0.5
"""At most: the bid."""


def changes_for(laptop: Cli, api: str, **trainer: Any) -> Path:
    """Write what has to differ in the lab: its machine type, CPUs, a model that two cores can train."""
    path = laptop.home / "lab.yaml"
    changes = {
        "model": {"init": "tiny", "warmup": None},
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
        "after": {"idle_minutes": 5.0 if trainer else IDLE_MINUTES},  # SkyPilot is silent for minutes
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
    assert results["ten steps"][1].startswith("10 steps of a tiny model")
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


def test_direct_every_step_passes_that_needs_no_gpu(lab: Lab, api: str, laptop: Cli) -> None:
    before = len(lab.machines())
    try:
        laptop(*arguments(laptop, changes_for(laptop, api)), timeout_s=WHOLE_S)
    except AssertionError:
        print(said_there(lab, before))
        raise
    check_report(laptop, lab, before)


def test_through_skypilot_every_step_passes_that_needs_no_gpu(
    lab: Lab, api: str, sky_user: dict[str, str], laptop: Cli
) -> None:
    """The real SkyPilot buys the head, which buys its spot machines with the rights of its role."""
    laptop.environment |= {**sky_user, "RLBOOST_HOME": str(laptop.home)}
    before = len(lab.machines())
    changes = changes_for(laptop, api, role=catalogue.ROLE)
    trying = laptop.start(*arguments(laptop, changes, "--via", "skypilot"))
    try:
        until(
            lambda: any(each["booted_at"] for each in lab.machines()[before:]) or trying.poll() is not None,
            WHOLE_S,
            "no head",
        )
        if trying.poll() is None:
            start_metadata_service(lab, lab.machines()[before]["id"])
        out, err = trying.communicate(timeout=2 * WHOLE_S)
    finally:
        trying.kill()
    assert trying.returncode == 0, f"{out}\n{err}\n{said_there(lab, before)}\n{laptop.tails()}"
    check_report(laptop, lab, before)


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_at_a_random_moment_it_leaves_nothing(lab: Lab, api: str, laptop: Cli, number: int) -> None:
    """Every second time nobody types anything afterwards: the machines end themselves."""
    rng = random.Random(1000 * SEED + number)
    before = len(lab.machines())
    typed = arguments(laptop, changes_for(laptop, api))
    trying = laptop.start(*typed)
    moment_s = rng.uniform(5, KILLED_BY_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        trying.wait(moment_s)
    trying.kill()
    trying.communicate()
    steps = report_of(laptop)["steps"] if (laptop.home / "report.json").exists() else []
    reached = steps[-1]["step"] if steps else "nothing"
    is_left_alone = number % 2 == 1
    print(f"killed after {moment_s:.0f} s, after {reached}{', left alone' if is_left_alone else ''}")
    if is_left_alone:
        until(lambda: all_gone(lab), ENDS_ITSELF_S, f"it does not end itself: {said_there(lab, before)}")
    has_ended_all = any(step["step"] == "end" and step["result"] == "passed" for step in steps)
    is_cut_off = trying.returncode != 0 and not has_ended_all
    if (laptop.home / "runs/acceptance-aws/job.json").exists() and is_cut_off:
        again = laptop(*typed, timeout_s=WHOLE_S)
        assert "this command only ends what it left" in again.stderr
        ended = {step["step"]: step["result"] for step in report_of(laptop)["steps"][-len(CLEANING) :]}
        assert ended["end"] == ended["nothing left"] == "passed"
    assert all_gone(lab), lab.machines()
    check_budget(lab, before)
