"""The paper's protocol on the public trace it used: all 2-hour windows, several seeded samples of half its
nodes.

    python -m benchmarks.paper.windows --trace FILE --sampler-seeds 20 --out windows.jsonl

One line of JSON per run is appended to `--out`; what is there already is not run again, so that a long
report may be interrupted. Which hours the paper's segments A, B and C are is not printed, so none is
chosen: every window counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlboost_runtime.sim import Switches, presets, simulate
from rlboost_runtime.sim.presets import DRAFT_TOKENS, SUFFIX_ACCEPTED_LENGTH
from rlboost_runtime.traces import Trace, load_trace, sample_nodes

WINDOW_S = 7_200.0
NODE_SHARE = 0.5
"""The paper samples half of the trace's nodes, each with its own events."""
LENGTH_SEED = 0
"""The same responses for every policy and window."""
WITHOUT = " without "
"""`rlboost without evening` is `rlboost` with that part turned off (`rlboost_runtime.sim.policies`)."""
ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    " one step ahead": {"max_staleness": 1},
    " in flight": {"max_staleness": 1, "in_flight_updates": True},
}
"""What may follow a policy's name: the job's settings with which it is run."""
WITH_DRAFTS = " with drafts"
"""What may follow these: engines decode speculatively, with the published accepted length."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    preset: str
    policy: str
    window: int
    sampler_seed: int

    @property
    def key(self) -> str:
        """Name in the file of results."""
        return f"{self.preset}/{self.policy}/{self.window}/{self.sampler_seed}"


def windows_of(trace: Trace) -> list[tuple[float, float]]:
    """Return all 2-hour windows, one after the other; the last one ends with the trace."""
    count = int(trace.duration_s // WINDOW_S)
    starts = [i * WINDOW_S for i in range(count)]
    if trace.duration_s - count * WINDOW_S > 60.0:
        starts.append(trace.duration_s - WINDOW_S)
    return [(start, start + WINDOW_S) for start in starts]


def cases(num_windows: int, sampler_seeds: int, policies: list[str]) -> Iterator[Case]:
    """Yield all runs; a policy without spot machines once per preset. Sampler seeds last, so that a part of
    them is a smaller report rather than a biased one."""
    names = list(presets())
    yield from (Case(name, "on_demand", 0, 0) for name in names)
    for sampler_seed in range(sampler_seeds):
        for window in range(num_windows):
            yield from (Case(name, policy, window, sampler_seed) for name in names for policy in policies)


def run(case: Case, trace: Trace) -> dict[str, object]:
    """Simulate one case."""
    start, end = windows_of(trace)[case.window]
    sampled = sample_nodes(trace, NODE_SHARE, case.sampler_seed).window(start, end)
    return {"key": case.key, **simulate_window(case.preset, sampled, case.policy)}


def simulate_window(preset: str, market: Trace, policy: str) -> dict[str, object]:
    """Simulate a policy on two hours of a market; return the run's figures."""
    began = time.process_time()
    played = presets()[preset]
    if policy.endswith(WITH_DRAFTS):
        policy = policy.removesuffix(WITH_DRAFTS)
        drafting = replace(
            played.assumptions, draft_tokens=DRAFT_TOKENS, accepted_length=SUFFIX_ACCEPTED_LENGTH
        )
        played = replace(played, assumptions=drafting)
    for ending, settings in ASYNCHRONOUS.items():
        if policy.endswith(ending):
            policy = policy.removesuffix(ending)
            played = replace(played, workload=replace(played.workload, **settings))
    name, _, part = policy.partition(WITHOUT)
    switches = Switches(**{part: False}) if part else Switches()
    hours = WINDOW_S / 3_600.0
    result = simulate(played, market, name, seed=LENGTH_SEED, hours=hours, switches=switches)
    return {
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_usd": result.tokens_per_usd,
        "usd_per_hour": result.usd_per_hour,
        "mean_spot_machines": result.mean_spot_machines,
        "steps": result.steps,
        "preemptions": result.preemptions,
        "tokens_lost": result.tokens_lost,
        "overheads_s": result.overheads_s,
        "cpu_s": round(time.process_time() - began, 2),
    }


def main(arguments: list[str]) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--sampler-seeds", type=int, default=20)
    parser.add_argument(
        "--policies", default="paper", help="oracle,paper,rlboost,rlboost without evening,rlboost in flight"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    trace = load_trace(options.trace)
    known = (
        {json.loads(line)["key"] for line in options.out.read_text().splitlines()}
        if options.out.exists()
        else set()
    )
    todo = list(cases(len(windows_of(trace)), options.sampler_seeds, options.policies.split(",")))
    with options.out.open("a", encoding="utf-8") as out:
        for number, case in enumerate(todo):
            if case.key in known:
                continue
            print(json.dumps(run(case, trace)), file=out, flush=True)
            print(f"{number + 1}/{len(todo)} {case.key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
