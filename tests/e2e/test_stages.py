"""One job after the other: SFT through a dead trainer, then online DPO of its model through kills."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlboost_runtime.audit.run import audit

pytestmark = [pytest.mark.e2e, pytest.mark.soak]


def lines_of(cli: Any, run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in cli.run_folder(run).metrics.read_text().splitlines()]


def imitate(cli: Any) -> str:
    """Train SFT with the trainer killed on the way; return the model's folder."""
    job = cli.job(
        "warm", algorithm={"loss": "sft", "steps": 12, "prompts_per_step": 16, "learning_rate": 3.0e-3},
        evaluation={"prompts": 4, "every_steps": 6, "samples": 2}, rollout={"spot": {"max_instances": 0}},
    )  # fmt: skip
    cli("launch", job, "--detach", "--yes")
    cli.wait("warm", lambda s: s["step"] >= 3, timeout_s=120)
    cli.process("warm", "trainer").kill()
    outcome = cli.wait_outcome("warm", timeout_s=200)
    assert outcome["exit_code"] == 0, outcome
    lines = lines_of(cli, "warm")
    assert [line["step"] for line in lines] == list(range(12))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert [i for i, line in enumerate(lines) if "eval_reward_mean" in line] == [0, 6, 11]
    assert lines[-1]["eval_updates"] == 12
    status, cost = cli.json("status", "warm"), cli.json("cost", "warm")
    assert status["reward_mean"] is None
    assert {machine["pool"] for machine in cost["machines"]} == {"reserved"}, "a machine was rented"
    assert audit(cli.run_folder("warm")).problems == []
    return str(cli.run_folder("warm").checkpoints / "model")


def busy_machine(status: dict[str, Any], killed: list[str]) -> str | None:
    for each in status["instances"]:
        is_busy = each["pool"] == "spot" and each["state"] == "ready" and each["in_flight"] >= 2
        if is_busy and each["machine"] not in killed:
            return str(each["machine"])
    return None


def test_sft_through_a_killed_trainer_rents_nothing(cli: Any) -> None:
    imitate(cli)
    cli.assert_gone("warm")


KILLS = 20


def train_through_kills(cli: Any, run: str, **job: Any) -> list[dict[str, float]]:
    """Train with `KILLS` machines killed while they work, and the trainer once; return the metrics."""
    steps = 4 + KILLS
    spot = {"any_of": [{"infra": "local", "price_usd_per_hour": 2.66, "preload": True}]}
    algorithm = {"steps": steps, "max_response_tokens": 30} | job.pop("algorithm")
    written = cli.job(run, rollout={"spot": spot}, algorithm=algorithm, **job)
    cli("launch", written, "--detach", "--yes")
    killed: list[str] = []
    while len(killed) < KILLS:
        status = cli.wait(run, lambda s: busy_machine(s, killed), timeout_s=120)
        killed.append(busy_machine(status, killed) or "")
        cli("preempt", run, killed[-1])
        if len(killed) == 2:
            cli.process(run, "trainer").kill()
    outcome = cli.wait_outcome(run, timeout_s=100 + 20 * KILLS)
    assert outcome["exit_code"] == 0, outcome

    lines = lines_of(cli, run)
    assert [line["step"] for line in lines] == list(range(steps))
    status, found = cli.json("status", run), audit(cli.run_folder(run))
    assert found.problems == []
    assert status["preemptions"]["reset"] >= KILLS
    assert status["responses"]["requested"] == status["responses"]["finished"]
    cli.assert_gone(run)
    return lines


def test_sft_then_dpo_through_kills(cli: Any) -> None:
    lines = train_through_kills(
        cli, "pairs", model=imitate(cli), algorithm={"loss": "dpo", "dpo": {"beta": 0.2}}
    )
    for line in lines:
        assert line["pairs"] + line["pairs_tied"] == 6
        assert line["tokens_trained"] > 0 or line["pairs"] == 0
    first = next(line for line in lines if line["pairs"])
    assert first["pair_margin"] == pytest.approx(0, abs=1e-4), "the start is the reference"
    assert lines[-1]["reference_kl"] > 0


def test_ppo_through_kills(cli: Any) -> None:
    """A critic of its own, which warms up for a step, and a KL per token."""
    lines = train_through_kills(
        cli, "critic", model={"warmup": {"reward": 0.1, "max_seconds": 30}},
        algorithm={
            "loss": "ppo", "ppo": {"learning_rate": 1.0e-3, "warmup_steps": 1}, "minibatches_per_step": 2,
            "kl": {"coef": 0.01, "estimator": "k1", "in": "reward"},
        },
    )  # fmt: skip
    assert [line["grad_norm"] > 0 for line in lines] == [False] + [True] * (len(lines) - 1)
    assert all(line["critic_grad_norm"] > 0 for line in lines)
    assert lines[0]["value_mean"] == 0, "a new head"
    assert lines[-1]["value_mean"] == pytest.approx(lines[-1]["return_mean"], abs=0.2), (
        "it went on after the kill"
    )
    saved = sorted(cli.run_folder("critic").checkpoints.glob("step-*/critic"))
    assert saved, "the critic is in the checkpoints"
