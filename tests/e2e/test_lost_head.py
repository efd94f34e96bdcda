"""A head is lost with its disk; another one goes on from the copy at the job's output."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.e2e_rig import Cli, cli_of_its_own
from tests.e2e.heads_rig import bucket_for, lose_head

pytestmark = [pytest.mark.e2e]
HEADS = int(os.environ.get("RLBOOST_HEADS", "3"))
SEED = int(os.environ.get("RLBOOST_SEED", "1"))
NAME = "lost"
LONGEST_S = 45.0
"""A head is lost within so long after its first copy: before its first step, or after several."""
LAG_S = 15.0
"""More than a round of copying takes on a busy machine."""


@pytest.fixture
def output(cli: Cli) -> Iterator[str]:
    with bucket_for(cli) as found:
        yield found


def launched(cli: Cli, output: str, steps: int) -> None:
    job = cli.job(
        NAME,
        output=output,
        algorithm={"steps": steps},
        trainer={"checkpoint_every_steps": 1},
    )
    cli("launch", job, "--detach", "--yes")


def resume(cli: Cli, output: str) -> str:
    done = cli("launch", "--resume", f"{output}/{NAME}", "--detach", "--yes")
    return done.stdout + done.stderr


def check_end(cli: Cli, steps: int) -> dict[str, Any]:
    """The run ended whole: done, audited, billed, and nothing is left of it."""
    outcome = cli.wait_outcome(NAME, 300.0)
    assert outcome["state"] == "done", outcome
    cli.assert_gone(NAME)
    found = cli.json("audit", NAME)
    assert found["clean"], (found["problems"], cli.tails())
    lines = [json.loads(line) for line in cli.run_folder(NAME).metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(steps))
    books: dict[str, Any] = cli.json("cost", NAME)
    assert all(machine["state"] != "running" for machine in books["machines"])
    return books


def test_another_head_goes_on_from_the_copy(cli: Cli, output: str) -> None:
    launched(cli, output, 3)
    cli.wait(NAME, lambda s: s["step"] >= 1 and (s["backup"] or {}).get("stored_bytes"), 120.0)
    time.sleep(6.0)  # a round of copying
    former = lose_head(cli, NAME)
    said = resume(cli, output)
    assert int(said.partition("continues after step ")[2].split()[0]) >= 1
    books = check_end(cli, 3)
    assert {each["id"] for each in former["machines"]} <= {each["id"] for each in books["machines"]}
    assert books["total_usd"] > former["total_usd"] - former["rate_usd_per_hour"] * LAG_S / 3600
    reserved = next(machine for machine in books["machines"] if machine["pool"] == "reserved")
    assert reserved["cost_usd"] > 0


@pytest.mark.soak
@pytest.mark.timeout(HEADS * 240 + 300)
def test_heads_that_are_lost_at_random_moments_cost_the_lag_only(cli: Cli, output: str) -> None:
    chance = random.Random(SEED)
    steps = 4 + 2 * HEADS
    lost: list[dict[str, Any]] = []
    found: dict[str, Any] = {"seed": SEED, "heads": lost, "pass": False}
    try:
        launched(cli, output, steps)
        for _ in range(HEADS):
            cli.wait(NAME, lambda s: (s["backup"] or {}).get("stored_bytes"), 120.0)
            time.sleep(chance.uniform(0.0, LONGEST_S))
            if cli.run_folder(NAME).outcome.exists():
                break
            status = json.loads(cli.run_folder(NAME).status.read_bytes())
            lose_head(cli, NAME)
            said = resume(cli, output)
            after = int((said.partition("continues after step ")[2].split() or ["0"])[0])
            lost.append({"lost_in_step": status["step"] + 1, "resumed_after": after, **status["backup"]})
        books = check_end(cli, steps)
        found |= {"usd": round(books["total_usd"], 4), "pass": len(lost) == HEADS}
    finally:
        print(json.dumps(found))
        if path := os.environ.get("RLBOOST_RESULT"):
            Path(path).write_text(f"{json.dumps(found)}\n")
    assert found["pass"]


@pytest.mark.soak
def test_a_head_that_comes_back_ends_itself(cli: Cli, output: str, tmp_path: Path) -> None:
    """It was stopped, not lost: it finds a newer head, ends its own run and leaves the other one alone."""
    launched(cli, output, 3)
    cli.wait(NAME, lambda s: s["step"] >= 1 and (s["backup"] or {}).get("stored_bytes"), 120.0)
    stopped = cli.processes(NAME)
    for process in stopped:
        process.suspend()
    (tmp_path / "elsewhere").mkdir()
    with cli_of_its_own(tmp_path / "elsewhere") as other:
        other.environment = {**cli.environment, "RLBOOST_HOME": str(other.home)}
        resume(other, output)
        for process in stopped:
            process.resume()
        outcome = cli.wait_outcome(NAME, 60.0)
        assert outcome["state"] == "failed"
        assert outcome["problem"].startswith(f"another machine is the head of {NAME} now")
        cli.assert_gone(NAME)
        check_end(other, 3)
