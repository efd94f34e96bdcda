"""Random lives with random faults through the real core: does every promise hold?

    python -m benchmarks.scheduler.faults --seeds 10000
    python -m benchmarks.scheduler.faults --first 4711 --seeds 1      # the one that failed, again

Prints how many runs, events, faults and kills there were, and writes it as JSON to `--out`; ends with 1 and
the seed at the first broken promise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from benchmarks.checkout import commit
from rlboost_runtime.sim.faults import run_with_faults

REPORT_EVERY_S = 2.0


def main(arguments: list[str]) -> int:
    """Run the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--policy", default=None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    runs_of: Counter[str] = Counter()
    sources = commit()
    said_at = time.monotonic()
    for number in range(options.seeds):
        seed = options.first + number
        try:
            report = run_with_faults(seed, options.policy)
        except Exception:  # noqa: BLE001 - whatever it is, the seed must be told
            traceback.print_exc()
            print(
                f"seed {seed} failed; again: python -m benchmarks.scheduler.faults --first {seed} --seeds 1"
            )
            return 1
        counts.update(steps=report.steps, events=report.events, faults=report.faults, kills=report.kills)
        runs_of[report.policy] += 1
        if time.monotonic() - said_at > REPORT_EVERY_S:
            said_at = time.monotonic()
            print(f"{number + 1}/{options.seeds}", file=sys.stderr)
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    print(f"{options.seeds:,} runs at {sources}: {told}; all promises held")
    if options.out is not None:
        first = {"is_simulated": True, "commit": sources, "first_seed": options.first, "runs": options.seeds}
        found = {**first, **counts, "runs_by_policy": dict(sorted(runs_of.items())), "broken_promises": 0}
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
