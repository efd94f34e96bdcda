"""The predictions with a constant number of machines, and the ablations: nothing here may move a parameter.

    python -m benchmarks.paper.predict --out predictions.jsonl [--only NAME ...]

One line of JSON per case is appended; what is there already is not run again. `report.py` sets them beside
the published figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.paper.static import FIRST_WINDOWS_S, run_static, settled
from rlboost_runtime.sim import Preset, Switches, presets, simulate
from rlboost_runtime.sim.presets import RESERVED_8_H100, SPOT_2_H100
from rlboost_runtime.traces import Trace, TraceEvent

SHORT_LIMIT = 5_120
"""The paper's "5K" response limit."""
RESTART_S = 1.0
"""The paper's replayer starts a killed instance again at once: its node is free again after so long."""
LONG_AWAY_S = 5_000.0
"""Longer than a step."""
SETTLED_STEP = 3
"""Number of the step in which machines are killed."""
KILL_SEEDS = (0, 1, 2, 3)
"""Seeds of lengths over which a kill's cost is averaged: it depends on what the killed machines hold."""
HOLD_S = 3_600.0
"""Seconds between two changes of the fleet in the ablation of seeding and memory; theirs is not known."""
KILLED = 3
"""Of six instances, in the paper's figure 14."""


def static(preset: str, machines: int, *, limit: int | None = None, groups: bool = True) -> dict[str, float]:
    """Return the settled step of the paper's policy (on demand for no machine)."""
    known = _limited(presets()[preset], limit)
    known = replace(known, assumptions=replace(known.assumptions, trains_whole_groups=groups))
    if machines == 0:
        rows = run_static(known, 0, "on_demand", steps=3).rows
        seconds, tokens = sum(r.seconds for r in rows), sum(r.tokens for r in rows)
        return {"tokens_per_s": tokens / seconds, "tokens_per_usd": tokens / sum(r.usd for r in rows)}
    found = settled(run_static(known, machines, "paper"))
    return {
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_usd": found.tokens_per_usd,
        "t_seed_s": found.t_seed_s,
        "wait_s": found.wait_s,
        "n_prem": found.n_prem,
    }


def kill_overhead(
    after_s: float, back_after_s: float = RESTART_S, boot_s: float | None = None
) -> dict[str, float]:
    """Return the mean seconds of a settled step: quiet, and with three of six machines killed after a while,
    what they had generated being kept (migrated) or not (recomputed).

    The killed machines are started again at once, as the paper's replayer does, and boot.
    """
    known = replace(presets()["paper-14b"], seeding_initial_s=FIRST_WINDOWS_S[6])
    if boot_s is not None:
        known = replace(known, assumptions=replace(known.assumptions, boot_s=boot_s))
    seconds = {"quiet_s": 0.0, "migrated_s": 0.0, "recomputed_s": 0.0}
    for seed in KILL_SEEDS:
        before = simulate(known, _six(()), "paper", seed=seed, hours=10.0, max_steps=SETTLED_STEP + 1)
        start = before.rows[SETTLED_STEP].started_s
        trace = _six(_taken(KILLED, start + after_s, start + after_s + back_after_s))
        seconds["quiet_s"] += before.rows[SETTLED_STEP].seconds / len(KILL_SEEDS)
        for name, migration in (("migrated_s", True), ("recomputed_s", False)):
            after = simulate(
                known,
                trace,
                "paper",
                seed=seed,
                hours=10.0,
                max_steps=SETTLED_STEP + 1,
                switches=Switches(migration=migration),
            )
            seconds[name] += after.rows[SETTLED_STEP].seconds / len(KILL_SEEDS)
    return seconds


def churn(switches: Switches, away_s: float = HOLD_S) -> dict[str, float]:
    """Return the mean throughput while five of six machines go and come back, twice (figure 12)."""
    known = replace(presets()["paper-14b"], seeding_initial_s=FIRST_WINDOWS_S[6])
    changes: list[TraceEvent] = []
    for begin in (HOLD_S, 2 * HOLD_S + away_s):
        changes += _taken(5, begin, begin + away_s)
    hours = (3 * HOLD_S + 2 * away_s) / 3_600.0
    result = simulate(known, _six(tuple(changes)), "paper", seed=0, hours=hours, switches=switches)
    return {"tokens_per_s": result.tokens_per_s, "steps": result.steps}


def unseeded(machines: int) -> dict[str, float]:
    """Return the settled step of the paper's policy without a window."""
    found = settled(run_static(presets()["paper-14b"], machines, "paper", switches=Switches(seeding=False)))
    return {"tokens_per_s": found.tokens_per_s, "wait_s": found.wait_s}


def larger(memory_share: float, machines: int) -> dict[str, float]:
    """Return 32B on engines and machines of two GPUs, as the smaller models have: an experiment.

    The settings for 32B are not published.
    """
    known = presets()["paper-32b"]
    shares = replace(known.assumptions, reserved_memory_share=memory_share, spot_memory_share=memory_share)
    known = replace(known, reserved=RESERVED_8_H100, spot=(SPOT_2_H100,), assumptions=shares)
    policy = "paper" if machines else "on_demand"
    found = run_static(known, machines, policy, steps=7 if machines else 3)
    if machines:
        return {"tokens_per_s": settled(found).tokens_per_s}
    return {"tokens_per_s": found.tokens_per_s}


def _taken(count: int, gone_s: float, back_s: float) -> tuple[TraceEvent, ...]:
    """Return the events of so many of the six nodes going and coming back."""
    gone = [TraceEvent(gone_s, f"node{i}", "remove") for i in range(count)]
    back = [TraceEvent(back_s, f"node{i}", "add") for i in range(count)]
    return (*gone, *back)


def _six(later: tuple[TraceEvent, ...]) -> Trace:
    begin = tuple(TraceEvent(0.0, f"node{i}", "add") for i in range(6))
    events = tuple(sorted((*begin, *later), key=lambda event: event.at_s))
    return Trace("six", "six machines, some of them taken and given back", events, 1e5)


def _limited(preset: Preset, limit: int | None) -> Preset:
    if limit is None:
        return preset
    return replace(preset, workload=replace(preset.workload, max_response_tokens=limit))


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "8b n=0": lambda: static("paper-8b", 0),
    "8b n=4": lambda: static("paper-8b", 4),
    "8b n=1": lambda: static("paper-8b", 1),
    "8b n=2": lambda: static("paper-8b", 2),
    "8b n=3": lambda: static("paper-8b", 3),
    "14b n=0": lambda: static("paper-14b", 0),
    "14b n=1": lambda: static("paper-14b", 1),
    "14b n=6": lambda: static("paper-14b", 6),
    "14b n=3": lambda: static("paper-14b", 3),
    "32b n=0": lambda: static("paper-32b", 0),
    "32b n=3": lambda: static("paper-32b", 3),
    "14b 5K n=0": lambda: static("paper-14b", 0, limit=SHORT_LIMIT),
    "14b 5K n=3": lambda: static("paper-14b", 3, limit=SHORT_LIMIT),
    "14b n=6 single responses": lambda: static("paper-14b", 6, groups=False),
    "kill at 100 s": lambda: kill_overhead(100.0),
    "kill at 200 s": lambda: kill_overhead(200.0),
    "churn": lambda: churn(Switches()),
    "churn, no seeding": lambda: churn(Switches(seeding=False)),
    "churn, no memory": lambda: churn(Switches(memory=False)),
    "kill at 100 s, none back": lambda: kill_overhead(100.0, LONG_AWAY_S),
    "kill at 200 s, none back": lambda: kill_overhead(200.0, LONG_AWAY_S),
    "kill at 100 s, back in 15 s": lambda: kill_overhead(100.0, boot_s=15.0),
    "kill at 200 s, back in 15 s": lambda: kill_overhead(200.0, boot_s=15.0),
    "14b n=1, no seeding": lambda: unseeded(1),
    "14b n=6, no seeding": lambda: unseeded(6),
    "churn, away for longer": lambda: churn(Switches(), 2.5 * HOLD_S),
    "churn, away for longer, no seeding": lambda: churn(Switches(seeding=False), 2.5 * HOLD_S),
    "32b TP 2, n=0": lambda: larger(0.6, 0),
    "32b TP 2, n=6": lambda: larger(0.6, 6),
    "32b TP 2, 80% memory, n=0": lambda: larger(0.8, 0),
    "32b TP 2, 80% memory, n=6": lambda: larger(0.8, 6),
}


def main(arguments: list[str]) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args(arguments)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {json.loads(line)["case"] for line in lines}
    with options.out.open("a", encoding="utf-8") as out:
        for name in options.only:
            if name in known:
                continue
            began = time.process_time()
            found = CASES[name]()
            line = {"case": name, **found, "cpu_s": round(time.process_time() - began, 2)}
            print(json.dumps(line), file=out, flush=True)
            print(name, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
