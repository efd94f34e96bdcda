"""A whole small run through the command line: the lease on one device, machines killed, the reward rising.

The kills are real (SIGKILL of a local machine's processes); the market draws them from a seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import PartReport
from rlboost_runtime.audit.run import audit
from rlboost_runtime.processes import kill_tagged
from rlboost_runtime.run.folder import RunFolder

NAME = "gpu-check"
STEPS, TINY_STEPS = 24, 2
ENDS = 5
"""The mean reward of so many last steps has to exceed that of as many first ones."""
WARMUP_S = 60
POLL_S = 0.2


def job(tiny: bool) -> dict[str, Any]:
    """Return the job: examples/quickstart.yaml, shorter, at twice its pace, with more kills."""
    if tiny:
        model: dict[str, Any] = {"init": "tiny", "warmup": None}
        market = {"seed": 7, "mean_lifetime_s": 25, "mean_absence_s": 1, "notice_fraction": 0.0}
    else:
        model = {"init": "tiny", "warmup": {"reward": 0.3, "max_seconds": WARMUP_S}}
        market = {"seed": 7, "mean_lifetime_s": 30, "mean_absence_s": 3, "notice_fraction": 0.2,
                  "notice_s": 4}  # fmt: skip
    return {
        "name": NAME,
        "model": model,
        "data": {
            "reasoning_gym": ["spell_backward"], "size": 64 if tiny else 2000,
            "config": {"min_word_len": 3, "max_word_len": 8},
        },
        "reward": "reasoning_gym",
        "algorithm": {
            "loss": "dapo", "group_size": 4 if tiny else 8, "prompts_per_step": 4 if tiny else 16,
            "steps": TINY_STEPS if tiny else STEPS, "minibatches_per_step": 1 if tiny else 4,
            "learning_rate": 5e-4, "learning_rate_warmup_steps": 3, "max_prompt_tokens": 96,
            "max_response_tokens": 16, "overlong_penalty_tokens": 5,
        },
        "trainer": {"infra": "local", "price_usd_per_hour": 10.47, "local_engines": 1},
        "rollout": {
            "engine": "transformers",
            "engine_args": {"max_running": 12, "tokens_per_s_per_response": 48},
            "spot": {
                "any_of": [{"infra": "local", "price_usd_per_hour": 2.66, "market": market}],
                "max_instances": 1 if tiny else 3,
            },
            "seeding_initial_s": 1.0,
        },
        "evidence": {"keep_journal": True, "count_tokens": True},
    }  # fmt: skip


def run(report: PartReport) -> None:
    """Launch, watch, judge."""
    with tempfile.TemporaryDirectory(prefix="rlboost-gpu-") as name:
        folder = RunFolder(Path(name) / "runs" / NAME)
        path = Path(name) / "job.json"
        path.write_text(json.dumps(job(report.tiny)))  # JSON is YAML
        try:
            _follow(report, Path(name), path, folder)
            _judge(report, folder)
        finally:
            kill_tagged(folder.path)


def _follow(report: PartReport, home: Path, path: Path, folder: RunFolder) -> None:
    """Run it to its end, or to shortly before the deadline."""
    environment = {**os.environ, "RLBOOST_HOME": str(home), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rlboost_cli.main", "launch", str(path), "--yes", "--detach"]
    started = time.monotonic()
    launched = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=max(1.0, report.left_s - 10), check=False,
    )  # fmt: skip
    if launched.returncode:
        raise RuntimeError(f"launch: exit {launched.returncode}: {launched.stdout}{launched.stderr}"[-600:])
    while not folder.outcome.exists() and report.left_s > 15:
        time.sleep(POLL_S)
    report.add(run_s=round(time.monotonic() - started, 1))
    if not folder.outcome.exists():
        for log in sorted(folder.path.glob("logs/**/*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
        report.add(rewards=_status(folder).get("reward_history"))
        raise TimeoutError("the run had not ended shortly before the part's deadline")


def _status(folder: RunFolder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(folder.status.read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def _judge(report: PartReport, folder: RunFolder) -> None:
    outcome, status = json.loads(folder.outcome.read_bytes()), _status(folder)
    rewards = status["reward_history"]
    report.add(
        outcome=outcome, steps=status["step"], rewards=[round(each, 4) for each in rewards],
        preemptions=status["preemptions"], responses=status["responses"],
    )  # fmt: skip
    report.check("ended_well", outcome["exit_code"] == 0)
    report.check("nothing_lost_or_doubled", audit(folder).problems == [])
    if report.tiny:
        report.add(reward="not judged: two steps without warm-up cannot show one that rises")
        return
    first, last = sum(rewards[:ENDS]) / ENDS, sum(rewards[-ENDS:]) / ENDS
    report.add(reward_first=round(first, 4), reward_last=round(last, 4))
    report.check("reward_rises", last > first)
    report.check("machines_were_killed", status["preemptions"]["reset"] + status["preemptions"]["silent"] > 0)
