"""Zero spot instances is a normal state, and so is losing all of them at once."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost_runtime.coordinator.audit import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def test_no_spot_machine_at_all_trains_to_the_end(cli: Any) -> None:
    job = cli.job("none", rollout={"spot": {"max_instances": 0}})
    done = cli("launch", job, "--yes")
    assert "none" in done.stdout
    status = cli.json("status", "none")
    assert status["state"] == "done"
    assert status["step"] == 3
    assert {m["pool"] for m in status["machines"]} == {"reserved"}
    assert audit(cli.run_folder("none")).problems == []


def test_all_spot_machines_lost_at_once_and_back_two_steps_later(cli: Any) -> None:
    trace = cli.home / "blackout.csv"
    trace.write_text("0,add,a\n0,add,b\n20000,remove,a\n20000,remove,b\n45000,add,c\n45000,add,d\n")
    offer = {"infra": "local", "price_usd_per_hour": 2.66, "market": {"trace": "blackout.csv"}}
    job = cli.job(
        "blackout",
        algorithm={"steps": 12, "max_response_tokens": 48},
        rollout={"spot": {"any_of": [offer], "max_instances": 2}},
    )
    cli("launch", job, "--detach", "--yes")
    cli.wait("blackout", lambda s: _spot(s, "ready") >= 1, timeout_s=120)
    dark = cli.wait("blackout", lambda s: _gone(s) >= 2 and _spot(s, "ready") == 0, timeout_s=120)
    lit = cli.wait("blackout", lambda s: _spot(s, "ready") >= 1 and s["step"] > dark["step"], timeout_s=120)
    assert lit["step"] - dark["step"] >= 1
    assert cli.wait_outcome("blackout", timeout_s=300)["exit_code"] == 0
    status = cli.json("status", "blackout")
    assert status["step"] == 12
    assert status["responses"]["requested"] == status["responses"]["finished"]
    assert audit(cli.run_folder("blackout")).problems == []


def _spot(status: dict[str, Any], state: str) -> int:
    return sum(i["pool"] == "spot" and i["state"] == state for i in status["instances"])


def _gone(status: dict[str, Any]) -> int:
    return sum(m["pool"] == "spot" and m["state"] == "gone" for m in status["machines"])
