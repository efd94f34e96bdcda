"""Do agents learn on machines that vanish? Two examples as users launch them, three seeds each.

    python -m benchmarks.learning.agents --out FOLDER --result agents.json --picture agents.svg

`examples/guess` is an environment of the kind (a), a Python class; `examples/verifiers` one of the kind (c),
a taskset of verifiers in a Python environment of its own. Jobs are the examples' own but for the seeds of
model and market, and for `evidence`: the market takes the only spot machine every 40 s on average. A finished
run is not repeated. Passes if each run's mean reward of the last five steps is above that of the first five,
machines were taken, and the audit, which compares each trained token with what was sampled, is clean. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ruamel.yaml import YAML

from benchmarks.checkout import commit
from rlboost_runtime.run.folder import RunFolder, read_json, write_json

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KINDS = ("guess", "verifiers")
SEEDS = 3
ENDS = 5
"""Steps of a beginning and of an end."""
RUN_TIMEOUT_S = 7200.0


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One example under one seed."""

    kind: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run and of its record."""
        return f"{self.kind}-{self.seed}"

    def write(self, folder: Path) -> Path:
        """Copy the example and return its job file, under this seed."""
        own = folder / self.name
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(EXAMPLES / self.kind, own)
        path = own / "job.yaml"
        fields = YAML(typ="safe").load(path)
        fields["name"] = self.name
        fields["algorithm"]["seed"] = self.seed
        fields["evidence"] = {"keep_journal": True, "count_tokens": True}
        fields["rollout"]["spot"]["any_of"][0]["market"]["seed"] = 3 + self.seed
        with path.open("w") as file:
            YAML().dump(fields, file)
        return path


def made(run: AgentRun, folder: Path) -> dict[str, Any]:
    """Launch a run, follow it to its end, and return its record. Raises `SystemExit` where it fails."""
    home = folder / "home"
    shutil.rmtree(home / "runs" / run.name, ignore_errors=True)
    job = run.write(folder)
    began = time.monotonic()
    with (folder / f"{run.name}.out").open("w") as out:
        done = _rlboost(home, "launch", str(job), "--yes", out=out)
    if done.returncode:
        raise SystemExit(f"{run.name} ended with exit code {done.returncode}; see {folder / run.name}.out")
    seconds = time.monotonic() - began
    status = json.loads(_rlboost(home, "status", run.name, "--json").stdout)
    audit = json.loads(_rlboost(home, "audit", run.name, "--json").stdout)
    lines = RunFolder(home / "runs" / run.name).metrics.read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "name": run.name,
        "seconds": round(seconds, 1),
        "machines_taken": sum(status["preemptions"].values()),
        "audit_clean": audit["clean"],
        "audit_problems": audit["problems"][:3],
        "turns_trained": audit["turns"]["trained"],
        "reward_mean": [round(step["reward_mean"], 4) for step in steps],
        "turns_mean": [round(step["turns_mean"], 3) for step in steps],
        "mismatch_kl_max": max(step["mismatch_kl"] for step in steps),
        "episodes_left_out": sum(
            value for step in steps for name, value in step.items() if name.startswith("episodes_left_out")
        ),
    }


def _rlboost(home: Path, *arguments: str, out: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RLBOOST_HOME": str(home)}
    command = [sys.executable, "-m", "rlboost_cli", *arguments]
    return subprocess.run(
        command, env=environment, stdout=out, stderr=subprocess.STDOUT if out != subprocess.PIPE else None,
        text=True, timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip


def has_learned(record: dict[str, Any]) -> bool:
    """Return True if a run passes."""
    rewards = record["reward_mean"]
    rises = fmean(rewards[-ENDS:]) > fmean(rewards[:ENDS])
    return rises and record["machines_taken"] > 0 and record["audit_clean"]


def draw(records: list[dict[str, Any]], kinds: Sequence[str], path: Path) -> None:
    """Draw every run's reward by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(kinds), 3.2), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        for record in records:
            if record["name"].startswith(kind):
                axes.plot(record["reward_mean"], lw=1.2, label=f"seed {record['name'].rpartition('-')[2]}")
        axes.set(title=kind, xlabel="step", ylabel="mean reward")
        axes.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    """Return 0 if every run passes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.agents")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(SEEDS), help="these alone")
    asked = parser.parse_args()
    folder = asked.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for seed in asked.seeds:
        for kind in asked.kinds:
            run = AgentRun(kind, seed)
            path = folder / f"{run.name}.json"
            record = read_json(path)
            if record is None:
                print(f"{run.name} begins", file=sys.stderr, flush=True)
                record = made(run, folder)
                write_json(path, record)
            rewards = record["reward_mean"]
            print(f"{run.name}: {fmean(rewards[:ENDS]):.3f} to {fmean(rewards[-ENDS:]):.3f}", file=sys.stderr)
            records.append(record)
    found = {
        "runs": records,
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {platform.python_version()}",
        "pass": all(map(has_learned, records)),
    }
    if asked.result is not None:
        asked.result.write_text(json.dumps(found, indent=1) + "\n")
    if asked.picture is not None:
        draw(records, asked.kinds, asked.picture)
    print(json.dumps(found))
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
