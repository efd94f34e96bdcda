"""The real stack at the paper's scale in real time; the last line of stdout is one JSON object with `pass`.

    python -m benchmarks.paper_scale --model 8B --minutes 30 --trace bamboo-p3

Real are the command line, supervisor, coordinator, TLS, agents (a process each), weight server and pullers,
journal, ledger, fleet controller and the kills of a recorded trace. Emulated, in real time and by the
simulator's own models, are the engines (`engine.py`) and the trainer (`trainer.py`). Nothing runs faster than
the clock.

The same window of the trace, the same lengths and the same set-up are then simulated, and each lived step is
held against its predicted one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from ruamel.yaml import YAML

from benchmarks.checkout import commit, python_path
from benchmarks.paper_scale.lived import Lived, read_lived
from benchmarks.paper_scale.scenario import FILE, Scenario
from benchmarks.paper_scale.watch import Watched, watch
from rlboost_cli.evidence.audit import audit_of
from rlboost_runtime.agent.engine_host import ENGINE
from rlboost_runtime.run.folder import RunFolder, home
from rlboost_runtime.sim.presets import presets
from rlboost_runtime.traces import Trace, sample_nodes, trace_rows
from rlboost_runtime.traces.catalogue import open_trace

NODE_SHARE, SAMPLE_SEED = 0.5, 0
"""The paper samples half of the trace's nodes."""
STEP_ERROR = 0.05
"""Most that the mean lived step may differ from the predicted one."""
MAX_LAG_P99_MS = 50.0
MAX_DISPATCH_P99_MS = 250.0
"""From the core's decision to the engine: a frame's time and some."""
MAX_GROWTH_MB_PER_HOUR = 30.0
"""Of the coordinator's memory, once it has seen its first step."""
COMMAND_S = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    """What is run."""

    model: str
    minutes: float
    trace: str
    start_minutes: float
    seed: int
    prompts: int
    max_response_tokens: int
    out: Path | None
    keep: Path | None

    @property
    def scenario(self) -> Scenario:
        """What engines and trainer emulate."""
        return Scenario(f"paper-{self.model.lower()}", self.seed, self.prompts, self.max_response_tokens)

    def market(self) -> Trace:
        """Return the part of the trace that the run lives through."""
        whole = _half_of(self.trace)
        start_s = 60.0 * self.start_minutes
        return whole.window(start_s, min(whole.duration_s, start_s + 60.0 * self.minutes + 3600.0))


@cache
def _half_of(trace: str) -> Trace:
    """Return the sample of a trace, read once: the run has a home of its own, without the traces."""
    return sample_nodes(open_trace(trace, home() / "traces"), NODE_SHARE, SAMPLE_SEED)


def write_job(folder: Path, name: str, scenario: Scenario, market: Trace | None) -> Path:
    """Write the job file, and beside it everything that it names. Without a market, machines are always to be
    had and nobody takes them."""
    preset = scenario.preset
    (folder / FILE).write_bytes(msgspec.json.encode(scenario))
    offer: dict[str, Any] = {"infra": "local", "price_usd_per_hour": preset.spot[0].usd_per_hour}
    if market is not None:
        (folder / "trace.csv").write_text("\n".join(trace_rows(market)) + "\n")
        offer["market"] = {"trace": "trace.csv", "notice_fraction": 0.0}
    (folder / "train.py").write_text("from benchmarks.paper_scale.trainer import main\n\nmain()\n")
    workload = preset.workload
    job = {
        "name": name,
        "model": {"init": "tiny", "warmup": None},  # none is loaded: the engines have no model
        "data": {"reasoning_gym": ["spell_backward"], "size": 200},
        "reward": "reasoning_gym",
        "algorithm": {
            "group_size": workload.group_size,
            "prompts_per_step": workload.prompts,
            "steps": 10_000,
            "max_prompt_tokens": 2 * workload.prompt_tokens,
            "max_response_tokens": workload.max_response_tokens,
            "seed": scenario.seed,
        },
        "trainer": {
            "script": "train.py",
            "local_engines": preset.reserved_engines,
            "price_usd_per_hour": preset.reserved_usd_per_hour,
        },
        "rollout": {
            "engine_args": {"max_running": preset.assumptions.max_running},
            "seeding_initial_s": preset.seeding_initial_s,
            "spot": {"any_of": [offer], "max_instances": preset.max_spot_instances},
        },
        "files": [FILE],
        "evidence": {"keep_journal": True},
    }
    path = folder / "job.yaml"
    with path.open("w") as file:
        YAML().dump(job, file)
    return path


def rlboost(*arguments: str | Path) -> None:
    """Run a command of the command line; raises `subprocess.SubprocessError` where it fails."""
    command = [sys.executable, "-m", "rlboost_cli", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=COMMAND_S)


def live(options: Options, folder: Path) -> tuple[RunFolder, Watched]:
    """Launch the run, watch it for its time, end it."""
    name = f"paper-scale-{options.model.lower()}"
    job = write_job(folder, name, options.scenario, options.market())
    rlboost("launch", job, "--yes", "--detach", "--no-doctor")
    run = RunFolder.named(name)
    try:
        watched = watch(run, time.monotonic() + 60.0 * options.minutes)
    finally:
        rlboost("down", name, "--yes")
    return run, watched


def report(options: Options, run: RunFolder, watched: Watched) -> dict[str, Any]:
    """Return everything that was found."""
    lived = read_lived(run, options.scenario)
    audit = audit_of(run)
    steps = lived.against_simulation(options.scenario, options.market())
    verdicts = _verdicts(lived, watched, audit, steps)
    mean_off = sum(s["lived_s"] for s in steps) / max(1e-9, sum(s["predicted_s"] for s in steps)) - 1.0
    return {
        "name": f"paper scale, {options.model}",
        "emulated": "engines and trainer, in real time; everything else is real",
        "command": " ".join(["python -m benchmarks.paper_scale", *sys.argv[1:]]),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}, nice {os.nice(0)}",
        "minutes": options.minutes,
        "responses_per_step": options.scenario.preset.workload.responses,
        "steps": steps,
        "step_s_lived_over_predicted": round(1.0 + mean_off, 4),
        "responses": audit["responses"],
        "audit_problems": audit["problems"][:20],
        "content_problems": lived.problems[:20],
        "kills": lived.kills,
        "predicted_kills": lived.predicted_kills,
        "latency_ms": lived.latency_ms,
        **watched.as_json(),
        "verdicts": verdicts,
        "pass": all(verdicts.values()),
    }


def _verdicts(
    lived: Lived, watched: Watched, audit: dict[str, Any], steps: list[dict[str, Any]]
) -> dict[str, bool]:
    predicted = sum(step["predicted_s"] for step in steps)
    off = sum(step["lived_s"] for step in steps) / predicted - 1.0 if predicted else 1.0
    growth = watched.growth_mb_per_hour
    return {
        "has_steps": bool(steps),
        "step_s_as_predicted": abs(off) <= STEP_ERROR,
        "audit_clean": bool(audit["clean"]),
        "every_token_right": not lived.problems,
        "memory_flat": growth is None or growth <= MAX_GROWTH_MB_PER_HOUR,
        "lag_p99": watched.lag_p99_ms <= MAX_LAG_P99_MS,
        "dispatch_p99": lived.latency_ms["dispatch"]["p99"] <= MAX_DISPATCH_P99_MS,
        "kills": lived.kills > 0,
    }


def parse() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = [name.removeprefix("paper-").upper() for name in presets()]
    parser.add_argument("--model", choices=models, default="8B")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trace", default="bamboo-p3", help="as rlboost simulate --trace")
    parser.add_argument("--start-minutes", type=float, default=46.0, help="where in the trace the run begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=128, help="of a step, 8 responses each")
    parser.add_argument("--max-response-tokens", type=int, default=14_336)
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--keep", type=Path, help="RLBOOST_HOME of the run; default: a temporary one")
    return Options(**vars(parser.parse_args()))


def main() -> int:
    """Run, report; 1 if a verdict does not hold."""
    options = parse()
    options.market()  # a trace that is not there is said before anything starts
    os.environ |= {
        ENGINE: "benchmarks.paper_scale.engine:ModelledEngine",
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="paper-scale-") as temporary:
        kept = options.keep or Path(temporary) / "home"
        os.environ["RLBOOST_HOME"] = str(kept.absolute())
        folder = Path(temporary) / "job"
        folder.mkdir()
        found = report(options, *live(options, folder))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0 if found["pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
