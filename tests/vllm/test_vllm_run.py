"""A whole run on vLLM: reserved and spot machines, two kills, every step's numerics beside the trainer's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlboost_runtime.coordinator.audit import audit
from rlboost_runtime.processes import MACHINE_TAG
from tests.e2e.e2e_rig import Cli, cli_of_its_own
from tests.vllm.vllm_rig import SLOWNESS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600 * SLOWNESS)]

STEPS = 8
SMALL_CONTEXT = 200
PHASES = {"imports", "load", "init", "first_token"}


def busy_spot(status: dict[str, Any], gone: set[str]) -> dict[str, Any] | None:
    """A spot instance with work, that took a version in place and was not killed before."""
    for row in status["instances"]:
        if row["pool"] == "spot" and row["in_flight"] and row["policy_version"] and row["id"] not in gone:
            return row
    return None


def processes_of_machine(cli: Cli, machine: str) -> list[psutil.Process]:
    """All processes of a machine and their descendants, whatever these say of themselves."""
    tagged = [p for p in cli.processes("on-vllm") if p.environ().get(MACHINE_TAG) == machine]
    found = {child for process in tagged for child in process.children(recursive=True)} | set(tagged)
    assert any("EngineCore" in " ".join(process.cmdline()) for process in found)
    return list(found)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    with cli_of_its_own(tmp_path) as tool:
        yield tool


def test_a_run_on_vllm_goes_on_through_kills(cli: Cli) -> None:
    job = cli.job(
        "on-vllm",
        algorithm={"steps": STEPS, "max_response_tokens": 32},
        rollout={"engine": "vllm", "engine_args": {"max_running": 8, "tokens_per_s_per_response": 8}},
    )
    cli("launch", job, "--detach", "--yes")
    gone: set[str] = set()
    for _ in range(2):
        status = cli.wait("on-vllm", lambda s: busy_spot(s, gone), timeout_s=240 * SLOWNESS)
        row = busy_spot(status, gone)
        assert row is not None
        assert row["start_s"].keys() >= PHASES
        assert 0 < row["pause_s"] <= row["load_s"] <= row["apply_s"]
        family = processes_of_machine(cli, row["machine"])
        cli("preempt", "on-vllm", row["id"])
        gone.add(row["id"])
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive, [process.cmdline() for process in alive]
    assert cli.wait_outcome("on-vllm", timeout_s=240 * SLOWNESS)["exit_code"] == 0

    status = cli.json("status", "on-vllm")
    assert (status["state"], status["step"]) == ("done", STEPS)
    assert status["preemptions"]["reset"] + status["preemptions"]["silent"] == 2
    assert status["tokens"]["migrated"] > 0
    assert status["responses"]["requested"] == status["responses"]["finished"] == STEPS * 6 * 4
    assert audit(cli.run_folder("on-vllm")).problems == []
    steps = [json.loads(line) for line in cli.run_folder("on-vllm").metrics.read_text().splitlines()]
    assert len(steps) == STEPS
    assert all(step["mismatch_tokens"] > 0 for step in steps)
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-6
    assert max(step["mismatch_abs_max"] for step in steps) < 1e-3
    cli.assert_gone("on-vllm")


@pytest.mark.soak
def test_a_small_cache_is_known_and_bounds_what_is_sent(cli: Cli) -> None:
    """The server allocates 1 MiB, which holds far fewer responses than there are slots."""
    job = cli.job(
        "small-cache",
        algorithm={"steps": 3, "max_response_tokens": SMALL_CONTEXT},
        rollout={
            "engine": "vllm",
            "vllm_args": {"max_num_seqs": 12},
            "spot": {"max_instances": 0},
            "engine_args": {"max_running": "auto", "kv_cache_mib": 1, "tokens_per_s_per_response": 60},
        },
    )
    seen: list[dict[str, Any]] = []

    def is_over(status: dict[str, Any]) -> bool:
        seen.extend(row for row in status["instances"] if row["kv_block_tokens"])
        return status["state"] == "done"

    cli("launch", job, "--detach", "--yes")
    status = cli.wait("small-cache", is_over, timeout_s=240 * SLOWNESS)
    assert status["responses"]["finished"] >= 64
    log = "".join(path.read_text() for path in cli.run_folder("small-cache").path.rglob("engine-*.log"))
    (reported,) = set(re.findall(r"KV cache size: ([0-9,]+) tokens", log))
    num_tokens = int(reported.replace(",", ""))
    assert num_tokens < 12 * SMALL_CONTEXT, "or slots bound more than the cache does"
    assert {row["kv_block_tokens"] for row in seen} == {32}
    assert {row["kv_tokens"] for row in seen} == {num_tokens - 32}, "one block is vLLM's own"
    assert {(row["max_running"], row["max_running_measured"]) for row in seen} == {(12, True)}
    free = [row["kv_free_tokens"] for row in seen if row["kv_free_tokens"] is not None]
    assert min(free) < num_tokens / 2, "it was full at some time"
    assert 0 < max(row["in_flight"] for row in seen) < 12, "slots alone would let 12 in"
    assert max(row["engine_preemptions"] for row in seen) == 0, "few responses are booked whole"
