"""`rlboost chaos` on a whole run: RLBOOST_CHAOS_MINUTES of faults of every kind, then the audit."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

MINUTES = float(os.environ.get("RLBOOST_CHAOS_MINUTES", "15"))
EVERY_S = 8.0


@pytest.mark.timeout(MINUTES * 60 + 1_500)
@pytest.mark.parametrize("seed", range(int(os.environ.get("RLBOOST_CHAOS_SEEDS", "3"))))
def test_faults_of_every_kind_lose_and_double_nothing(cli: Any, seed: int) -> None:
    job = cli.job("chaos", algorithm={"steps": 100_000})
    cli("launch", job, "--detach", "--yes")
    faults = ("--seed", str(seed), "--every", str(EVERY_S), "--minutes", str(MINUTES), "--no-audit", "--json")
    done = json.loads(cli("chaos", "chaos", *faults, timeout_s=MINUTES * 60 + 300).stdout)
    assert sum(done["faults"].values()) >= MINUTES * 60 / EVERY_S / 3
    assert len(done["faults"]) >= min(7, MINUTES * 2)
    assert cli.json("status", "chaos")["step"] >= 1
    cli("down", "chaos", "--yes")
    found = cli.json("audit", "chaos")
    assert found["clean"]
    assert found["responses"]["requested"] == sum(
        found["responses"][name] for name in ("finished", "cancelled", "unfinished")
    )
    cli.assert_gone("chaos")
    print(json.dumps({"seed": seed, **done, **{name: found[name] for name in ("responses", "tokens")}}))
