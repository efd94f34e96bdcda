"""Run examples/quickstart.yaml once per seed; the last line of stdout is one JSON object with `pass`.

A seed decides initial weights, generated prompts, their order and sampling. The market stays that of the
example. After each run the plan of the same job, now calibrated with that run, is held against its bill.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from ruamel.yaml import YAML

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
EDGE_STEPS = 5
"""First and last steps whose rewards are compared, as in the run's own summary."""
LIFT, USEFUL_SHARE, MIN_KILLS, MIN_NOTICES, MAX_MINUTES = 1.3, 0.6, 4, 1, 5.0
PLAN_ERROR = 0.15
RUN_DEADLINE_S = 1_200.0


def _job(seed: int, folder: Path) -> Path:
    yaml = YAML(typ="safe")
    job = yaml.load(EXAMPLE)
    job["name"] = f"quickstart-{seed}"
    job["model"]["seed"] = job["data"]["seed"] = job["algorithm"]["seed"] = seed
    path = folder / f"{job['name']}.yaml"
    yaml.dump(job, path)
    return path


def _rlboost(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "rlboost_cli", *map(str, arguments)]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=RUN_DEADLINE_S
    ).stdout


def _measure(seed: int, folder: Path) -> dict[str, Any]:
    job = _job(seed, folder)
    name = job.stem
    _rlboost("launch", job, "--yes")
    status, cost = (json.loads(_rlboost(command, name, "--json")) for command in ("status", "cost"))
    plan = json.loads(_rlboost("plan", job, "--json"))["forecast"]
    market = (Path(os.environ["RLBOOST_HOME"]) / "runs" / name / "cloud" / "market.jsonl").read_text()
    kinds = [json.loads(line)["kind"] for line in market.splitlines()]
    rewards = status["reward_history"]
    first, last = fmean(rewards[:EDGE_STEPS]), fmean(rewards[-EDGE_STEPS:])
    reserved = next(machine for machine in cost["machines"] if machine["pool"] == "reserved")
    alone = cost["counterfactual"]
    row = {
        "seed": seed,
        "minutes": round(reserved["billed_s"] / 60.0, 2),
        "reward": [round(first, 4), round(last, 4)],
        "lift": round(last / first, 3),
        "kills": kinds.count("kill"),
        "notices": kinds.count("notice"),
        "responses_lost": status["responses"]["requested"] - status["responses"]["finished"],
        "tokens": status["tokens"]["trained"],
        "tokens_lost": status["tokens"]["lost_estimate"],
        "useful_share": round(cost["useful_usd"] / cost["total_usd"], 3),
        "usd": cost["total_usd"],
        "saving": round(alone["saving_fraction"], 3),
        "plan_usd": round(plan["usd"]["mean"], 4),
        "plan_half_width_usd": round(plan["usd"]["half_width"], 4),
        "plan_minutes": round(plan["hours"]["mean"] * 60.0, 2),
        "plan_error_usd": round(plan["usd"]["mean"] / cost["total_usd"] - 1.0, 3),
        "plan_error_minutes": round(plan["hours"]["mean"] * 3600.0 / reserved["billed_s"] - 1.0, 3),
    }
    row["pass"] = all(_promises(row).values())
    return row


def _promises(row: dict[str, Any]) -> dict[str, bool]:
    return {
        "lift": row["lift"] >= LIFT,
        "useful_share": row["useful_share"] >= USEFUL_SHARE,
        "kills": row["kills"] >= MIN_KILLS,
        "notices": row["notices"] >= MIN_NOTICES,
        "minutes": row["minutes"] <= MAX_MINUTES,
        "responses_lost": row["responses_lost"] == 0,
        "plan": max(abs(row["plan_error_usd"]), abs(row["plan_error_minutes"])) <= PLAN_ERROR,
    }


def main() -> None:
    """Run the seeds one after the other; exits with 1 if a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file for the rows and the summary")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLBOOST_HOME"] = (
            folder  # the warm-up's cache included: each seed warms up its own weights
        )
        for seed in range(options.seeds):
            row = _measure(seed, Path(folder))
            print(
                json.dumps({**row, "failed": [k for k, holds in _promises(row).items() if not holds]}),
                flush=True,
            )
            rows.append(row)
    summary = {"seeds": len(rows), "pass": all(row["pass"] for row in rows)}
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": rows, **summary}, indent=1) + "\n")
    print(json.dumps(summary))
    sys.exit(0 if summary["pass"] else 1)


if __name__ == "__main__":
    main()
