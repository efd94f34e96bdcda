"""The quickstart's step time as `rlboost plan` predicts it, and as it is; and do live event logs replay?

    python -m benchmarks.scheduler.quickstart --out quickstart.json

Measured, on this machine, in about five minutes: `rlboost plan examples/quickstart.yaml --probe` runs a few
steps and predicts, then `rlboost launch` runs the quickstart with its kills and notices, in a home of its
own that is removed afterwards. The prediction is read off between its rows at the number of spot instances
that the run really had, on average. Each run's event log is driven through a fresh core: all commands, in
order, must be those that the live one gave.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkout import commit
from rlboost_cli.simulation.rates import Rates, rates_of
from rlboost_runtime.audit.run import audit
from rlboost_runtime.coordinator.storage.journal import read_events
from rlboost_runtime.run.create import stored_job
from rlboost_runtime.run.folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "quickstart.yaml"
TIMEOUT_S = 480.0
"""For either run."""


def measure(home: Path) -> dict[str, Any]:
    """Predict, run, replay. Raises `subprocess.SubprocessError` where a command fails or takes too long."""
    plan = json.loads(_rlboost(home, "plan", str(EXAMPLE), "--probe", "--json"))
    _rlboost(home, "launch", str(EXAMPLE), "--yes")
    runs = home / "runs"
    folders = {name: RunFolder(runs / name) for name in ("quickstart-probe", "quickstart")}
    found = _rates(folders["quickstart"])
    predicted = at_instances(plan["forecast"]["rows"], found.spot_instances)
    return {
        "commit": commit(),
        "cpus": os.cpu_count(),
        "predicted_step_s": predicted,
        "measured_step_s": found.step_s,
        "off": predicted / found.step_s - 1.0,
        "measured_steps": found.num_steps,
        "probe_steps": plan["forecast"]["measured"]["num_steps"],
        "spot_instances": found.spot_instances,
        "replays": {name: _replay(home, folder) for name, folder in folders.items()},
    }


def at_instances(rows: list[dict[str, float]], instances: float) -> float:
    """Return the step time between a forecast's rows; beyond them, that of the last."""
    below = max((r for r in rows if r["instances"] <= instances), key=lambda r: r["instances"])
    above = min((r for r in rows if r["instances"] >= instances), key=lambda r: r["instances"], default=below)
    if above["instances"] == below["instances"]:
        return below["step_s"]
    share = (instances - below["instances"]) / (above["instances"] - below["instances"])
    return below["step_s"] + share * (above["step_s"] - below["step_s"])


def as_markdown(found: Mapping[str, Any] | None) -> list[str]:
    """Return a section of the report."""
    if not found:
        return ["The quickstart's step time has not been predicted and measured."]
    replays = ", ".join(
        f"{name} ({r['events']:,} events): {'identical' if r['is_identical'] else 'DIFFERENT'}"
        for name, r in found["replays"].items()
    )
    return [
        "## The quickstart: predicted, and measured",
        "",
        f"Measured at {found['commit']} with {found['cpus']} shared CPUs, not simulated."
        f" `rlboost plan --probe` looked at {found['probe_steps']} steps and predicts"
        f" {found['predicted_step_s']:.2f} s a step with {found['spot_instances']:.2f} spot instances, as"
        f" many as the run then had on average;"
        f" {found['measured_steps']} steps of the quickstart, with its kills, took"
        f" {found['measured_step_s']:.2f} s each ({found['off']:+.1%}).",
        "",
        f"Live event logs driven through a fresh core, commands against the live ones: {replays}.",
    ]


def _rates(run: RunFolder) -> Rates:
    found = rates_of(run, stored_job(run))
    assert found is not None, "a finished quickstart has measured steps"
    return found


def _replay(home: Path, run: RunFolder) -> dict[str, Any]:
    live = json.loads(_rlboost(home, "status", run.name, "--json"))["replay"]["digest"]
    return {
        "events": sum(1 for _ in read_events(run.events)),
        "is_identical": audit(run).commands_digest == live,
    }


def _rlboost(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlboost_cli.main", *arguments],
        env={**os.environ, "RLBOOST_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout


def main(arguments: list[str]) -> int:
    """Run both and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rlboost-quickstart-") as home:
        found = measure(Path(home))
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(as_markdown(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
