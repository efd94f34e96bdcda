"""A run that works ahead: the next step is rolled out while one is trained, also through a dead trainer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

STEPS = 6


@pytest.mark.parametrize("in_flight", [False, True], ids=["one version", "in-flight updates"])
def test_steps_asked_for_ahead_are_whole_and_trained_once(cli: Any, in_flight: bool) -> None:
    ahead = {"steps": STEPS, "max_staleness": 1, "in_flight_updates": in_flight}
    job = cli.job("ahead", algorithm=ahead, rollout={"spot": {"max_instances": 1}})
    attached = cli.start("launch", job, "--yes")
    cli.wait("ahead", lambda s: s["step"] >= 2, timeout_s=200)
    cli.process("ahead", "trainer").kill()
    out, err = attached.communicate(timeout=750)
    assert attached.returncode == 0, f"{out}\n{err}\n{cli.tails()}"

    run = cli.run_folder("ahead")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert lines[0]["staleness"] == 0
    assert {line["staleness"] for line in lines[1:]} <= {0, 1}
    assert sum(line["staleness"] for line in lines) >= STEPS - 2, "only a restart makes a step fresh"
    found = audit(run)
    assert found.problems == []
    versions = {step.step: step.policy_version for step in found.steps}
    assert versions == {int(line["step"]): int(line["policy_version"]) for line in lines}
    assert cli.json("status", "ahead")["step"] == STEPS
    if in_flight:
        assert sum(line["newer_tokens_share"] for line in lines) > 0, "versions were taken up in a step"
    else:
        assert not any("newer_tokens_share" in line for line in lines)
    cli.assert_gone("ahead")
