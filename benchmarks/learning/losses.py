"""Does each loss learn, and does a run that works ahead learn as well? Runs through the product, one by one.

    python -m benchmarks.learning.losses losses --out FOLDER      # seven losses, 3 seeds each
    python -m benchmarks.learning.losses staleness --out FOLDER   # max_staleness 0 and 1, 5 seeds each

The recipe is the quickstart's at full speed on machines that nobody takes. A finished run is not repeated.
The last line of stdout is one JSON object with every run's reward per step.

- losses: passes if every run of every loss ends above its beginning (last five steps against first five).
- staleness: passes if the mean rewards of the last five steps differ by at most two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from ruamel.yaml import YAML

from benchmarks.learning.conditions import RECIPE, WARMUP_S, Planned
from benchmarks.learning.evidence import RunRecord
from benchmarks.learning.runs import Laboratory
from rlboost_runtime.job import Algorithm
from rlboost_runtime.run_folder import RunFolder

LOSSES: tuple[str, ...] = get_args(Algorithm.model_fields["loss"].annotation)
ENDS = 5
"""Steps of a beginning and of an end."""


def planned(what: str, seeds: int, steps: int) -> list[Planned]:
    """Return all runs, seed by seed, so that a stop leaves whole seeds."""
    if what == "losses":
        variants: dict[str, dict[str, Any]] = {loss.replace("_", "-"): {"loss": loss} for loss in LOSSES}
    else:
        variants = {f"staleness-{bound}": {"max_staleness": bound} for bound in (0, 1)}
    return [
        Planned(name, seed, _job(f"{name}-{seed}", seed, steps, changes))
        for seed in range(seeds)
        for name, changes in variants.items()
    ]


def _job(name: str, seed: int, steps: int, changes: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = YAML(typ="safe").load(RECIPE)
    job["name"] = name
    job["model"]["seed"] = seed
    job["model"]["warmup"]["max_seconds"] = WARMUP_S
    job["algorithm"] |= {"seed": seed, "steps": steps, **changes}
    job["rollout"]["engine_args"].pop("tokens_per_s_per_response", None)
    job["rollout"]["spot"]["any_of"][0].pop("market", None)
    job["rollout"]["spot"]["max_instances"] = 1
    job["evidence"] = {"keep_journal": True}
    return job


def judge_losses(curves: dict[str, list[list[float]]]) -> tuple[float, bool]:
    """Return the smallest lift of any run, and whether all are above 0."""
    lifts = [_end(curve) - statistics.fmean(curve[:ENDS]) for runs in curves.values() for curve in runs]
    return min(lifts), min(lifts) > 0


def judge_staleness(curves: dict[str, list[list[float]]]) -> tuple[float, bool]:
    """Return the difference of the ends in standard errors, and whether it is at most two."""
    fresh, stale = ([_end(curve) for curve in curves[f"staleness-{bound}"]] for bound in (0, 1))
    error = math.sqrt(sum(statistics.variance(ends) / len(ends) for ends in (fresh, stale)))
    difference = abs(statistics.fmean(stale) - statistics.fmean(fresh))
    return difference / error if error else math.inf * difference, difference <= 2 * error


def _end(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-ENDS:])


def rewards(run: RunFolder) -> list[float]:
    """Return a run's mean reward per step."""
    return [float(json.loads(line)["reward_mean"]) for line in run.metrics.read_text().splitlines()]


def main() -> int:
    """Run what is not run yet, judge, print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("losses", "staleness"))
    parser.add_argument("--seeds", type=int, default=None, help="3 for losses, 5 for staleness")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    seeds = arguments.seeds or {"losses": 3, "staleness": 5}[arguments.what]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    laboratory = Laboratory(arguments.out.absolute(), commit)
    curves: dict[str, list[list[float]]] = {}
    for each in planned(arguments.what, seeds, arguments.steps):
        made: RunRecord | None = laboratory.stored(each)
        if made is None:
            laboratory.make(each, lambda words: print(words, file=sys.stderr, flush=True))
        run = RunFolder(laboratory.folder / "home" / "runs" / each.name)
        curves.setdefault(each.condition, []).append(rewards(run))
    judge = judge_losses if arguments.what == "losses" else judge_staleness
    value, passed = judge(curves)
    unit = "smallest lift of a run's reward" if arguments.what == "losses" else "standard errors apart"
    detail = {"curves": curves, "seeds": seeds, "steps": arguments.steps, "commit": commit}
    found = {"name": f"learning-{arguments.what}", "value": value, "unit": unit, "pass": passed}
    print(json.dumps({**found, "target": 0 if arguments.what == "losses" else 2, "detail": detail}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
