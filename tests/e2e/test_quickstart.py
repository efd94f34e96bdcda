"""The README's main job, exactly as it is shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit

pytestmark = pytest.mark.e2e

LIFT = 1.2
"""The recipe's own bar is 1.3 (benchmarks/learning, over seeds);
a mean of five steps has a standard deviation of 0.04 or so here, hence the room."""
PLAN_ERROR = 0.15
"""Of the bill: by so much the plan of the same job may miss it where its own interval is narrower."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def test_quickstart_learns_through_kills_and_notices(cli: Any) -> None:
    done = cli("launch", EXAMPLE, "--yes", timeout_s=480)
    status = cli.json("status", "quickstart")
    rewards = status["reward_history"]
    assert len(rewards) >= 20
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last >= LIFT * first, (first, last)

    market = (cli.run_folder("quickstart").cloud / "market.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in market]
    assert kinds.count("kill") >= 4
    assert kinds.count("notice") >= 1

    assert status["responses"]["requested"] == status["responses"]["finished"] == len(rewards) * 16 * 8
    assert status["responses"]["quarantined"] == 0
    found = audit(cli.run_folder("quickstart"))
    assert found.problems == []
    assert found.commands_digest == status["replay"]["digest"]
    cost = cli.json("cost", "quickstart")
    machines = sum(round(m["cost_usd"] * 1e6) for m in cost["machines"])
    assert round(cost["total_usd"] * 1e6) == machines + sum(
        round(v * 1e6) for v in cost["other_usd"].values()
    )
    assert "$" in done.stdout

    forecast = cli.json("plan", EXAMPLE)["forecast"]  # calibrated with this run
    usd = forecast["usd"]
    assert abs(usd["mean"] - cost["total_usd"]) <= max(usd["half_width"], PLAN_ERROR * cost["total_usd"])
    cli.assert_gone("quickstart")
    print(f"reward {first:.3f} -> {last:.3f}, {kinds.count('kill')} kills, {kinds.count('notice')} notices")
