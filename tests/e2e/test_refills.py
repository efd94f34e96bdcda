"""Dynamic sampling on a live fleet: steps are refilled until they are full, through kills of every part."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

STEPS = 6
PROMPTS = 6
REWARD = """
def score(prompt, response, row):
    if sum(map(ord, prompt)) % 2:
        return 1.0  # a group of such a prompt is flat
    return (sum(map(ord, response)) % 5) / 5
"""


def refilling(status: dict[str, Any]) -> bool:
    counts = status["step_responses"]
    return counts is not None and PROMPTS * 4 < counts["requested"] > counts["finished"]


def test_steps_are_refilled_until_they_are_full_through_kills(cli: Any) -> None:
    (cli.home / "rewards.py").write_text(REWARD)
    job = cli.job(
        "refilled", reward="rewards.py:score",
        algorithm={
            "steps": STEPS, "prompts_per_step": PROMPTS, "zero_variance_groups": "replace", "max_refills": 4,
        },
    )  # fmt: skip
    cli("launch", job, "--detach", "--yes")
    for step, role in enumerate(("trainer", "coordinator", "trainer")):
        cli.wait("refilled", lambda s, step=step: s["step"] >= step and refilling(s), timeout_s=150)
        cli.process("refilled", role).kill()
    outcome = cli.wait_outcome("refilled", timeout_s=300)
    assert outcome["exit_code"] == 0, outcome
    lines = [json.loads(line) for line in cli.run_folder("refilled").metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["groups_trained"] for line in lines] == [PROMPTS] * STEPS
    assert sum(line["refills"] for line in lines) >= 3
    found, status = audit(cli.run_folder("refilled")), cli.json("status", "refilled")
    assert found.problems == []
    assert status["responses"]["requested"] == status["responses"]["finished"]
    cli.assert_gone("refilled")
