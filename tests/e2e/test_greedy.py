"""Greedy sampling: a step through kills gives the tokens of the quiet step, up to true near-ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlboost_runtime.audit.run import Audit, audit
from tests.e2e.e2e_rig import merged

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

NEAR_TIE = 1e-4  # top-2 logit gap under which either token is right in float32

GREEDY: dict[str, Any] = {
    "model": {"init": "tiny", "warmup": {"reward": 0.25, "max_seconds": 15}},
    "algorithm": {
        "steps": 1,
        "prompts_per_step": 8,
        "group_size": 3,
        "temperature": 0.0,
        "max_response_tokens": 48,
    },
    "rollout": {"engine_args": {"max_running": 16}, "spot": {"max_instances": 2}},
}
PACES = (0.6, 0.3, 0.15)
"""Tokens per second and response: on a slow machine the first may end before three kills have landed."""


def test_kills_do_not_change_a_greedy_step(cli: Any) -> None:
    cli("launch", cli.job("quiet", **GREEDY), "--yes", "--detach")
    assert cli.wait_outcome("quiet", timeout_s=200)["exit_code"] == 0
    for pace in PACES:
        name = f"storm-{round(100 * pace)}"
        resets = storm_through(cli, name, pace)
        if resets >= 3:
            break
    assert resets >= 3, f"a step at {pace} tokens per second ended after {resets} kills"

    quiet, storm = audit(cli.run_folder("quiet")), audit(cli.run_folder(name))
    assert quiet.problems == []
    assert storm.problems == []
    hit = {r: n for r, n in storm.assignments.items() if n >= 3}
    assert hit, "no response was hit twice"

    differing = compare(quiet, storm)
    if differing:
        gaps = [top_two_gap(cli, prompt, prefix) for prompt, prefix in differing]
        print(f"{len(gaps)} sequences differ; top-2 logit gaps at the first difference: {gaps}")
        assert max(gaps) < NEAR_TIE, gaps


def storm_through(cli: Any, name: str, pace: float) -> int:
    """Run the step at this pace through up to four kills; return how many the run itself has counted."""
    rollout = {"engine_args": {"tokens_per_s_per_response": pace}}
    cli("launch", cli.job(name, **merged(GREEDY, {"rollout": rollout})), "--yes", "--detach")
    kills = 0
    while kills < 4 and not cli.run_folder(name).outcome.exists():
        status = cli.wait(name, lambda s: _busy(s) or s["state"] == "done", timeout_s=120, poll_s=0.05)
        machine = _busy(status)
        if machine is None:
            break
        cli("preempt", name, machine)
        kills += 1
        cli.wait(name, lambda s, m=machine: _busy(s) != m, timeout_s=30, poll_s=0.05)
    assert cli.wait_outcome(name, timeout_s=300)["exit_code"] == 0
    return int(cli.json("status", name)["preemptions"]["reset"])


def compare(quiet: Audit, storm: Audit) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, common prefix) of every response whose tokens differ."""
    (a,), (b,) = quiet.steps, storm.steps
    assert a.prompts == b.prompts
    differing = []
    for response, mine in a.tokens.items():
        theirs = b.tokens[response]
        if mine != theirs:
            left, right = np.frombuffer(mine, np.int32), np.frombuffer(theirs, np.int32)
            size = min(len(left), len(right))
            apart = np.flatnonzero(left[:size] != right[:size])
            assert len(apart), (
                f"response {response} is a prefix of the other: {len(left)} and {len(right)} tokens"
            )
            prompt = np.frombuffer(a.prompts[response], np.int32).tolist()
            differing.append((prompt, left[: apart[0]].tolist()))
    return differing


def top_two_gap(cli: Any, prompt: list[int], prefix: list[int]) -> float:
    """Return the gap between the two largest next-token logits under policy version 0."""
    import torch
    from transformers import AutoModelForCausalLM

    (folder,) = (cli.home / "cache" / "tiny").glob("*")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + prefix])).logits[0, -1]
    top = torch.topk(logits, 2).values
    return float(top[0] - top[1])


def _busy(status: dict[str, Any]) -> str | None:
    for instance in status["instances"]:
        if instance["pool"] == "spot" and instance["state"] == "ready" and instance["in_flight"] >= 2:
            return str(instance["machine"])
    return None
