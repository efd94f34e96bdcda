"""Useful time over wall time where something fails in a share of the steps; one JSON object a line.

    python -m benchmarks.ettr simulated --steps 100 --out ettr.jsonl
    python -m benchmarks.ettr live --steps 30 --out ettr.jsonl

ETTR is the trained tokens per second of wall time, over the same without failures. In each run nothing else
fails: the fleet is constant. `simulated` plays the presets at the paper's scale. `live` kills processes of
the real stack (`live.py`), at steps a fifth as long, with a restoring that is a fifth as long, and simulates
the same beside it. Runs that are in the file already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.checkout import commit, python_path
from benchmarks.ettr.failures import Failure, failures, restart_all_s, restore_s
from benchmarks.ettr.live import Live
from benchmarks.ettr.simulated import Measured, Simulated
from benchmarks.paper_scale.scenario import Scenario
from rlboost_runtime.agent.engine_host import ENGINE
from rlboost_runtime.sim.presets import Preset, presets

SHARES = (0.0, 0.05, 0.1, 0.2)
"""Failures per step."""
PRESETS = ("paper-8b", "paper-14b", "paper-32b")
SHORT = {"prompts": 32, "max_response_tokens": 3072}
"""Live: steps of 75 s instead of 408."""
SHORT_BY = 75.0 / 408.0


def main() -> int:
    """Run what is not in the file yet."""
    options = _options()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a run that is going on is ended
    known = (
        [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    )
    done = {(row["mode"], row["name"], row["failures_per_step"]) for row in known}
    for name in options.presets if options.mode == "simulated" else PRESETS[:1]:
        for share in options.shares:
            if (options.mode, name, share) in done:
                continue
            row = (
                _simulated(name, share, options)
                if options.mode == "simulated"
                else _live(name, share, options)
            )
            row = {"mode": options.mode, "name": name, "failures_per_step": share, **row, "commit": commit()}
            print(json.dumps(row), flush=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def _simulated(name: str, share: float, options: argparse.Namespace) -> dict[str, Any]:
    preset = presets()[name]
    base = _undisturbed(preset, options.steps, options.seed)
    step_s, back_s = base.seconds / options.steps, restore_s(preset)
    planned = failures(options.steps, share, options.seed)
    found = _play(preset, planned, options, step_s, back_s) if planned else base
    return {
        **_row(found, options.steps),
        "step_s_without_failures": round(step_s, 1),
        "trainer_restore_s": round(back_s, 1),
        "ettr": round(found.tokens_per_s / base.tokens_per_s, 4),
        "computed_ettr_of_starting_over": round(
            base.seconds / (base.seconds + restart_all_s(preset, step_s, planned)), 4
        ),
    }


def _live(name: str, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Live: a run's own ETTR needs the run without failures, so the reader divides by that row."""
    back_s = SHORT_BY * restore_s(presets()[name])
    scenario = Scenario(name, options.seed, restore_s=back_s, **SHORT)
    base = _undisturbed(scenario.preset, options.steps, options.seed)
    step_s = base.seconds / options.steps
    planned = failures(options.steps, share, options.seed)
    with tempfile.TemporaryDirectory(prefix="ettr-") as temporary:
        os.environ |= {
            ENGINE: "benchmarks.paper_scale.engine:ModelledEngine",
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",
            "RLBOOST_HOME": f"{temporary}/home",
        }
        job = Path(temporary) / "job"
        job.mkdir()
        live = Live(f"ettr-{round(100 * share)}", scenario, planned, options.steps, step_s)
        found, problems = live.run(job)
    same = _play(scenario.preset, planned, options, step_s, back_s) if planned else base
    return {
        **_row(found, options.steps),
        "problems": problems[:20],
        "step_s_without_failures_simulated": round(step_s, 1),
        "trainer_restore_s": round(back_s, 1),
        "simulated_ettr_of_the_same": round(same.tokens_per_s / base.tokens_per_s, 4),
        "load": round(os.getloadavg()[2], 1),
    }


@cache
def _undisturbed(preset: Preset, steps: int, seed: int) -> Measured:
    """Simulate the run in which nothing fails, once for all shares."""
    return Simulated(preset, [], steps, seed, step_s=0.0, restore_s=0.0).run()


def _play(
    preset: Preset, planned: list[Failure], options: argparse.Namespace, step_s: float, back_s: float
) -> Measured:
    return Simulated(preset, planned, options.steps, options.seed, step_s=step_s, restore_s=back_s).run()


def _row(found: Measured, steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "failures": found.failures,
        "step_s": round(found.seconds / steps, 1),
        "tokens_per_s": round(found.tokens_per_s, 1),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("simulated", "live"))
    parser.add_argument("--steps", type=int, default=100, help="after the warm-up of 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="failures per step")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS, help="for simulated")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
