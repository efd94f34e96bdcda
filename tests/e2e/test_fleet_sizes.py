"""Losing all spot instances at once is a normal state (none from the beginning: test_bad_input_run.py)."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost_providers.registry import provider_for
from rlboost_runtime.audit.run import audit
from rlboost_runtime.run.resolved import read_resolved

pytestmark = [pytest.mark.e2e, pytest.mark.soak]


def test_all_spot_machines_lost_at_once_and_back_two_steps_later(cli: Any) -> None:
    market = {
        "seed": 22,
        "mean_lifetime_s": 1.0e6,
        "mean_absence_s": 25.0,
    }  # a place stays empty after a loss
    offer = {"infra": "local", "price_usd_per_hour": 2.66, "market": market}
    job = cli.job(
        "blackout",
        algorithm={"steps": 14, "max_response_tokens": 24, "prompts_per_step": 4},
        rollout={
            "engine_args": {"max_running": 8, "tokens_per_s_per_response": 6},
            "spot": {"any_of": [offer], "max_instances": 2},
        },
    )
    cli("launch", job, "--detach", "--yes")
    full = cli.wait("blackout", lambda s: _working_spot(s) == 2 and s["step"] >= 1, timeout_s=120)
    run = cli.run_folder("blackout")
    provider = provider_for(read_resolved(run.job_json), run)  # two commands could take seconds to start
    for machine in _spot_machines(full):
        provider.preempt("blackout", machine["id"], None)
    cli.wait("blackout", lambda s: _spot(s, "ready") == 0, timeout_s=30)
    lit = cli.wait("blackout", lambda s: _spot(s, "ready") >= 1, timeout_s=120)
    assert lit["preemptions"]["reset"] >= 2
    lost = [e for e in lit["events"] if e["kind"] in ("preempted", "lost")]
    assert any("; moving its " in e["text"] for e in lost), f"not in the middle of a step: {lost}"
    came = [e["at"] for e in lit["events"] if e["kind"] == "ready" and "spot" in e["text"]]
    back_at = next(at for at in came if at > lost[-1]["at"])
    meanwhile = [e for e in lit["events"] if e["kind"] == "step" and lost[-1]["at"] < e["at"] <= back_at]
    assert len(meanwhile) >= 2, lit["events"]
    assert cli.wait_outcome("blackout", timeout_s=300)["exit_code"] == 0
    status = cli.json("status", "blackout")
    assert status["step"] == 14
    assert status["responses"]["requested"] == status["responses"]["finished"]
    assert audit(cli.run_folder("blackout")).problems == []


def _spot_machines(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [m for m in status["machines"] if m["pool"] == "spot" and m["state"] == "running"]


def _working_spot(status: dict[str, Any]) -> int:
    return sum(i["pool"] == "spot" and i["in_flight"] > 0 for i in status["instances"])


def _spot(status: dict[str, Any], state: str) -> int:
    return sum(i["pool"] == "spot" and i["state"] == state for i in status["instances"])
