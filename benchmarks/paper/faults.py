"""Random lives with random faults through the real core: does every promise hold?

    python -m benchmarks.paper.faults --seeds 10000
    python -m benchmarks.paper.faults --first 4711 --seeds 1      # the one that failed, again

Prints how many runs, events, faults and kills there were; ends with 1 and the seed at the first broken
promise.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from rlboost_runtime.sim.faults import run_with_faults

REPORT_EVERY_S = 2.0


def main(arguments: list[str]) -> int:
    """Run the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--policy", default=None)
    options = parser.parse_args(arguments)
    events = faults = kills = steps = 0
    said_at = time.monotonic()
    for number in range(options.seeds):
        seed = options.first + number
        try:
            report = run_with_faults(seed, options.policy)
        except Exception:  # noqa: BLE001 - whatever it is, the seed must be told
            traceback.print_exc()
            print(f"seed {seed} failed; again: python -m benchmarks.paper.faults --first {seed} --seeds 1")
            return 1
        events, faults = events + report.events, faults + report.faults
        kills, steps = kills + report.kills, steps + report.steps
        if time.monotonic() - said_at > REPORT_EVERY_S:
            said_at = time.monotonic()
            print(f"{number + 1}/{options.seeds}", file=sys.stderr)
    counts = f"{steps} steps, {events} events, {faults} faults, {kills} kills"
    print(f"{options.seeds} runs: {counts}; all promises held")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
