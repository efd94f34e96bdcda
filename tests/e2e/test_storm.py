"""One run through kills: nothing lost but a flush, nothing doubled, the books and the log agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit
from rlboost_runtime.run.folder import RunFolder

pytestmark = pytest.mark.e2e

PACE = 12  # tokens per second and response in the small job
FLUSH_S = 0.05


def busy_spot_machine(status: dict[str, Any]) -> str | None:
    """Return a spot machine that is generating, if there is one."""
    for instance in status["instances"]:
        if instance["pool"] == "spot" and instance["state"] == "ready" and instance["in_flight"] >= 2:
            return str(instance["machine"])
    return None


def test_a_run_through_kills_and_notices_keeps_every_promise(cli: Any) -> None:
    pair = {"infra": "local", "price_usd_per_hour": 2.66, "accelerators": "cpu:2"}
    spot = {"max_instances": 2, "any_of": [pair]}  # machines of two engines
    job = cli.job("storm", algorithm={"steps": 4, "max_response_tokens": 60}, rollout={"spot": spot})
    cli("launch", job, "--detach", "--yes")
    for notice in (None, "4", None):
        status = cli.wait("storm", busy_spot_machine, timeout_s=120)
        machine = busy_spot_machine(status)
        cli("preempt", "storm", machine, *([] if notice is None else ["--notice", notice]))
        cli.wait("storm", lambda s, m=machine: not _alive(s, m), timeout_s=30)
    outcome = cli.wait_outcome("storm", timeout_s=240)
    assert outcome["exit_code"] == 0, outcome

    run = cli.run_folder("storm")
    status = cli.json("status", "storm")
    found = audit(run)
    assert found.problems == []
    assert machines_with_two_engines(run), "each machine has one engine only"
    assert status["responses"]["requested"] == status["responses"]["finished"] == found.requested == 4 * 24
    assert found.commands_digest == status["replay"]["digest"], "the log replays to other commands"
    assert status["preemptions"]["noticed"] == 1
    assert status["preemptions"]["reset"] == 2
    assert status["responses"]["migrated"] > 0

    per_flush = max(1, round(PACE * FLUSH_S))
    kills_per_response = 2
    assert all(lost <= per_flush * kills_per_response for lost in found.lost.values()), found.lost
    assert found.tokens_generated == found.tokens_accepted + sum(found.lost.values())

    cost = cli.json("cost", "storm")
    micro = [round(m["cost_usd"] * 1e6) for m in cost["machines"]]
    other = sum(round(v * 1e6) for v in cost["other_usd"].values())
    assert round(cost["total_usd"] * 1e6) == sum(micro) + other
    assert all(m["ended_at"] is not None for m in cost["machines"])
    wasted = {kind: round(usd * 1e6) for kind, usd in cost["wasted_usd"].items()}
    assert min(wasted.values()) > 0, (
        "machines booted, waited, were killed at work, and their work was migrated"
    )
    assert sum(wasted.values()) + round(cost["useful_usd"] * 1e6) == sum(micro)
    cli.assert_gone("storm")


@pytest.mark.soak
def test_notice_loses_nothing(cli: Any) -> None:
    job = cli.job("notice", algorithm={"steps": 2, "max_response_tokens": 60})
    cli("launch", job, "--detach", "--yes")
    status = cli.wait("notice", busy_spot_machine, timeout_s=120)
    cli("preempt", "notice", busy_spot_machine(status), "--notice", "4")
    assert cli.wait_outcome("notice", timeout_s=240)["exit_code"] == 0
    found = audit(cli.run_folder("notice"))
    assert found.problems == []
    assert found.lost == {}
    assert json.loads(cli.run_folder("notice").status.read_text())["preemptions"]["noticed"] == 1


def machines_with_two_engines(run: RunFolder) -> list[Path]:
    """Machines on which both engines generated: each keeps a count of its own tokens."""
    counts = [path for path in run.path.glob("**/engine-*.tokens") if path.stat().st_size]
    return [path.parent for path in counts if path.name == "engine-1.tokens"]


def _alive(status: dict[str, Any], machine: str) -> bool:
    return any(m["id"] == machine and m["state"] in ("running", "intended") for m in status["machines"])
