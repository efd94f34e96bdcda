"""A whole run on vLLM: reserved and spot machines, two kills, every step's numerics beside the trainer's."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlboost_runtime.audit.run import audit
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


def listening_of(run: str, cli: Cli) -> set[tuple[str, str, int]]:
    """Program, address and port of every listening socket of a run's processes and their descendants."""
    processes = {child for p in cli.processes(run) for child in (p, *p.children(recursive=True))}
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process.name()
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((name, each.laddr.ip, each.laddr.port))
    return found


def is_closed(found: tuple[str, str, int]) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(found[1]).is_loopback


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
        assert all(is_closed(each) for each in listening_of("on-vllm", cli))
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


HEAD, OUTSIDER = "10.232.79.1", "10.232.79.2"
SCAN = """
import asyncio, json, sys

async def is_open(port, turns):
    async with turns:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(sys.argv[1], port), 10)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

async def main():
    turns = asyncio.Semaphore(400)
    found = await asyncio.gather(*(is_open(port, turns) for port in range(1, 65536)))
    print(json.dumps([port for port, is_there in enumerate(found, 1) if is_there]))

asyncio.run(main())
"""


@pytest.fixture
def scan() -> Iterator[Callable[[], set[int]]]:
    """Returns the TCP ports of this machine that another network namespace, one wire away, can connect to."""
    name = f"rlbscan{os.getpid()}"
    here, there = f"h{name[-12:]}", f"n{name[-12:]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        told = f"a network namespace cannot be made here ({made.stderr.strip()}): run as root"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    try:
        for words in (
            f"link add {here} type veth peer name {there} netns {name}",
            f"addr add {HEAD}/30 dev {here}",
            f"link set {here} up",
            f"-n {name} addr add {OUTSIDER}/30 dev {there}",
            f"-n {name} link set {there} up",
        ):
            subprocess.run(["ip", *words.split()], check=True, capture_output=True)
        command = ["ip", "netns", "exec", name, sys.executable, "-c", SCAN, HEAD]
        yield lambda: set(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)  # takes the wire with it


@pytest.mark.soak
def test_a_head_with_two_ranks_and_vllm_has_two_ports_open(cli: Cli, scan: Callable[[], set[int]]) -> None:
    """The ranks' store and gloo, vLLM's server, its store and its workers are on loopback."""
    before = scan()
    job = cli.job(
        "closed",
        algorithm={"steps": 40, "max_response_tokens": 32},
        trainer={"ranks": 2, "address": HEAD},
        rollout={"engine": "vllm", "spot": {"max_instances": 0}, "engine_args": {"max_running": 8}},
    )
    cli("launch", job, "--detach", "--yes")
    cli.wait("closed", lambda status: status["step"] >= 1, timeout_s=240 * SLOWNESS)
    run = cli.run_folder("closed")
    wanted = {
        int(json.loads(path.read_bytes())["public_url"].rsplit(":", 1)[1])
        for path in (run.endpoint, run.weights_endpoint)
    }
    assert len(wanted) == 2
    assert scan() - before == wanted
    listening = listening_of("closed", cli)
    closed = {found for found in listening if is_closed(found)}
    assert len(closed) >= 4, "the store of the ranks, gloo on each, vLLM's server"
    assert {port for _, _, port in listening - closed} == wanted, "with IPv6"
    cli("down", "closed", "--yes")
    cli.assert_gone("closed")


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
