"""Does each loss learn, and does work ahead of training learn as well? Run by run, each finished one kept.

    python -m benchmarks.learning.losses losses --out FOLDER      # seven losses, 3 seeds each
    python -m benchmarks.learning.losses ppo --out FOLDER         # with a critic, 3 seeds
    python -m benchmarks.learning.losses stages --out FOLDER      # sft, rejection, dpo; 3 seeds each
    python -m benchmarks.learning.losses staleness --out FOLDER   # max_staleness 0, 1, in flight; 5 seeds

The recipe is the quickstart's (spell_backward of reasoning-gym, 128 responses per step), **without a fleet**:
prompts, reward, advantages, losses, optimizer and the rule of what is rolled out ahead are the trainer's own,
sampling happens in this process (`offline.py`). All runs of a seed begin with the same warmed-up model. A
finished run is not repeated; `--limit` makes a few and stops (exit code 3). Once all are there, the last line
of stdout is one JSON object with every run's reward per step, and `--result` and `--picture` are written.

- losses, ppo, stages: passes if every run of every loss ends above its beginning (last five steps against
  first five). The reward of an sft step is that of responses to its prompts, sampled before they are trained
  on.
- staleness: passes if the mean rewards of the last five steps, of max_staleness 1 without and with
  in_flight_updates, differ by at most two standard errors from those of 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from ruamel.yaml import YAML

from benchmarks.learning.conditions import RECIPE, WARMUP_S
from benchmarks.learning.offline import scorer_of, train, warmed_up
from rlboost_runtime.job import WITHOUT_RATIO, Job, Loss
from rlboost_runtime.run.folder import read_json, write_json
from rlboost_runtime.trainer.artifacts.checkpoint import replace_folder
from rlboost_runtime.trainer.learn.policy import Policy

LOSSES: tuple[str, ...] = tuple(
    loss for loss in get_args(Loss) if loss not in WITHOUT_RATIO and loss != "ppo"
)
CRITIC_LEARNING_RATE = 1e-3
ENDS = 5
"""Steps of a beginning and of an end."""
MORE_TO_DO = 3
"""Exit code where `--limit` left runs to make."""
IN_FLIGHT = "in-flight"
TOLD = ("reward_mean", "staleness", "clip_share", "entropy", "grad_norm", "length_mean")
"""Metrics of each step that are kept; with them its `mismatch_kl`, or `lag_kl` where it has staleness."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One run."""

    condition: str
    seed: int
    job: Job

    @property
    def name(self) -> str:
        """Also its file's."""
        return f"{self.condition}-{self.seed}"

    @property
    def digest(self) -> str:
        """Digest of the job: a stored result counts only for the same one."""
        return hashlib.sha256(self.job.canonical_json().encode()).hexdigest()[:16]


def planned(what: str, seeds: int, steps: int) -> list[Planned]:
    """Return all runs, seed by seed, so that a stop leaves whole seeds."""
    if what == "losses":
        variants: dict[str, dict[str, Any]] = {loss: {"loss": loss} for loss in LOSSES}
    elif what == "ppo":
        variants = {"ppo": {"loss": "ppo", "ppo": {"learning_rate": CRITIC_LEARNING_RATE}}}
    elif what == "stages":
        variants = {loss: {"loss": loss} for loss in WITHOUT_RATIO}
    else:
        variants = {f"staleness-{bound}": {"max_staleness": bound} for bound in (0, 1)}
        variants[IN_FLIGHT] = {"max_staleness": 1, "in_flight_updates": True}
    return [
        Planned(name, seed, _job(seed, steps, changes))
        for seed in range(seeds)
        for name, changes in variants.items()
    ]


def _job(seed: int, steps: int, changes: dict[str, Any]) -> Job:
    job: dict[str, Any] = YAML(typ="safe").load(RECIPE)
    job["model"]["seed"] = seed
    job["model"]["warmup"]["max_seconds"] = WARMUP_S
    job["algorithm"] |= {"seed": seed, "steps": steps, **changes}
    if changes.get("loss") == "sft":
        job["rollout"]["spot"]["max_instances"] = 0
    return Job.model_validate_json(json.dumps(job))


def make(run: Planned, out: Path, commit: str, files: Path = RECIPE.parent) -> dict[str, Any]:
    """Make a run and keep its record. `files`: what the job's paths are relative to."""
    started, used = time.monotonic(), time.process_time()
    with scorer_of(run.job, files) as scorer:
        model = out / "models" / str(run.seed)
        if not model.is_dir():
            policy, report = warmed_up(run.job, files, scorer)
            if not report.reached:
                raise SystemExit(f"seed {run.seed}: {report.describe()}: its runs would begin elsewhere")
            replace_folder(model, policy.save)
        rows = train(Policy.load(model), run.job, files, scorer)
    record = {
        "name": run.name, "condition": run.condition, "seed": run.seed, "job": run.digest, "commit": commit,
        "seconds": round(time.monotonic() - started, 1), "cpu_s": round(time.process_time() - used, 1),
        **{name: [round(row[name], 5) for row in rows] for name in TOLD},
        "mismatch_kl": [round(row.get("mismatch_kl", row.get("lag_kl", 0.0)), 5) for row in rows],
    }  # fmt: skip
    write_json(out / f"{run.name}.json", record)
    return record


def stored(run: Planned, out: Path) -> dict[str, Any] | None:
    """Return the record of a run, if it was made. Exits where it is another job's."""
    record: dict[str, Any] | None = read_json(out / f"{run.name}.json")
    if record is not None and record["job"] != run.digest:
        raise SystemExit(f"{out / run.name}.json was made by another job: give another --out")
    return record


def judge_losses(curves: dict[str, list[list[float]]]) -> tuple[float, bool]:
    """Return the smallest lift of any run, and whether all are above 0."""
    lifts = [end(curve) - statistics.fmean(curve[:ENDS]) for runs in curves.values() for curve in runs]
    return min(lifts), min(lifts) > 0


def judge_staleness(curves: dict[str, list[list[float]]]) -> tuple[float, bool]:
    """Return the largest difference of the ends from those of fresh runs in standard errors, and whether it
    is at most two."""
    fresh = [end(curve) for curve in curves["staleness-0"]]
    found = []
    for condition in curves.keys() - {"staleness-0"}:
        stale = [end(curve) for curve in curves[condition]]
        error = math.sqrt(sum(statistics.variance(ends) / len(ends) for ends in (fresh, stale)))
        difference = abs(statistics.fmean(stale) - statistics.fmean(fresh))
        found.append(difference / error if error else math.inf if difference else 0.0)
    return max(found), max(found) <= 2


def end(curve: Sequence[float]) -> float:
    """Return the mean of a curve's last steps."""
    return statistics.fmean(curve[-ENDS:])


def summary(what: str, records: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return the verdict with all that it rests on."""
    curves: dict[str, list[list[float]]] = {}
    for record in records:
        curves.setdefault(record["condition"], []).append(record["reward_mean"])
    value, passed = (judge_staleness if what == "staleness" else judge_losses)(curves)
    return {
        "name": f"learning-{what}",
        "value": round(value, 4),
        "unit": "standard errors apart" if what == "staleness" else "smallest lift of a run's reward",
        "target": 2 if what == "staleness" else 0,
        "pass": passed,
        "detail": {
            "what": "spell_backward, 128 responses per step, sampled in the trainer's process: no fleet",
            "steps": steps,
            "seeds": len(next(iter(curves.values()))),
            "commits": sorted({record["commit"] for record in records}),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cpu_s": round(sum(record["cpu_s"] for record in records)),
            "ends": {name: [round(end(curve), 4) for curve in each] for name, each in curves.items()},
            "curves": curves,
        },
    }


def main() -> int:
    """Make what is not made yet, judge, print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("losses", "ppo", "stages", "staleness"))
    parser.add_argument("--seeds", type=int, default=None, help="5 for staleness, else 3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=int, default=None, help="make at most so many runs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, help="JSON file for the result")
    parser.add_argument("--picture", type=Path, help="SVG file for the curves")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    runs = planned(
        arguments.what, arguments.seeds or (5 if arguments.what == "staleness" else 3), arguments.steps
    )
    missing = [run for run in runs if stored(run, arguments.out) is None]
    for run in missing[: arguments.limit]:
        made = make(run, arguments.out, commit)
        first, last = statistics.fmean(made["reward_mean"][:ENDS]), end(made["reward_mean"])
        told = f"{run.name}: {first:.3f} -> {last:.3f}, {made['seconds']} s, {made['cpu_s']} CPU s"
        print(told, file=sys.stderr, flush=True)
    records = [record for run in runs if (record := stored(run, arguments.out)) is not None]
    if len(records) < len(runs):
        return MORE_TO_DO
    found = summary(arguments.what, records, arguments.steps)
    if arguments.result is not None:
        write_json(arguments.result, found)
    if arguments.picture is not None:
        from benchmarks.learning.pictures import draw_curves

        draw_curves(found["detail"]["curves"], arguments.picture)
    print(json.dumps(found))
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
