"""The whole report: predictions, all windows of the trace, `rlboost` beside `paper`, pictures.

    python -m benchmarks.paper [--sampler-seeds 20] [--trace FILE] [--out build/paper]

About 70 minutes of CPU with 20 sampler seeds; it may be stopped and started again: what has been run is kept
in `--out`. Without `--trace` the trace is fetched from its origin, once. The result is `report.md`,
`report.json` and the pictures.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.paper import (
    other_traces,
    ours,
    predict,
    windows,
)
from benchmarks.paper.report import write_report
from benchmarks.scheduler import after_change, fleet_size, quickstart, scale, window_cost
from rlboost_runtime.traces.catalogue import fetch_trace, known

REPOSITORY = Path(__file__).resolve().parents[2]
TRACE = "bamboo-p3"
POLICIES = "oracle,paper,rlboost"


def main(arguments: list[str]) -> int:
    """Run what is missing and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sampler-seeds", type=int, default=20)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "paper")
    options = parser.parse_args(arguments)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ.get("RLBOOST_HOME", Path.home() / ".rlboost"))
    trace = options.trace or fetch_trace(known(TRACE), home / "traces")
    predict.main(["--out", str(out / "predictions.jsonl")])
    ours.main(["--out", str(out / "ours.jsonl")])
    fleet_size.main(["--out", str(out / "fleet_size.jsonl")])
    after_change.main(["--out", str(out / "after_change.jsonl")])
    if not (out / "quickstart.json").exists():
        quickstart.main(["--out", str(out / "quickstart.json")])
    if not (out / "scale.jsonl").exists():
        scale.main(["--out", str(out / "scale.jsonl")])
    if not (out / "window_cost.jsonl").exists():
        window_cost.main(["--out", str(out / "window_cost.jsonl")])
    windowed = str(out / "windows.jsonl")
    seeds = str(options.sampler_seeds)
    windows.main(["--trace", str(trace), "--sampler-seeds", seeds, "--policies", POLICIES, "--out", windowed])
    other_traces.main(["--out", str(out / "other_traces.jsonl")])
    print("\n".join(write_report(out, out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
