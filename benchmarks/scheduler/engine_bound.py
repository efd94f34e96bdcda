"""What of the oracle is left if its engines do no better than the simulated ones at their best.

    python -m benchmarks.scheduler.engine_bound --trace FILE

The oracle's engines decode with a full KV cache in each step. A simulated engine keeps room for the growth of
what it runs and takes prefills, so with an endless queue it does less: `engine_share`. The last figure is the
oracle with such engines over the oracle: no policy can come nearer, whatever it does with versions, machines
and the trainer. All windows of the trace, the first sample of its nodes; one line of JSON per preset.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

from benchmarks.paper.windows import LENGTH_SEED, NODE_SHARE, WINDOW_S, windows_of
from rlboost_runtime.sim import Preset, presets
from rlboost_runtime.sim.engine_model import EngineModel, Sequence, engine_speed
from rlboost_runtime.sim.oracle import simulate_oracle, work_of
from rlboost_runtime.sim.responses import StepLengths, draw_lengths
from rlboost_runtime.traces import load_trace, sample_nodes

STEPS = 4
"""Of responses in the queue: more than an engine does in the time."""
SETTLED_S, END_S = 600.0, 3_000.0
"""From when to when an engine is watched."""


def engine_share(preset: Preset) -> float:
    """Return a spot engine's token-steps per second with an endless queue over the most that it could do."""
    speed = engine_speed(
        preset.model,
        preset.spot[0],
        preset.assumptions.spot_memory_share,
        preset.calibration,
        preset.assumptions,
    )
    engine = EngineModel(speed)
    for step in range(STEPS):
        lengths = draw_lengths(preset.workload, preset.assumptions, LENGTH_SEED, step)
        for prompt, tokens in zip(lengths.prompts, lengths.tokens, strict=True):
            key = len(engine.sequences)
            engine.submit(Sequence(key, response=key, prompt=prompt, tokens=0, goal=tokens))
    engine.advance(SETTLED_S)
    done = engine.advance(END_S)
    assert engine.num_waiting, "the queue ran empty"
    ended = StepLengths(tuple(each.prompt for each in done), tuple(each.goal for each in done))
    return work_of(ended) / (END_S - SETTLED_S) / speed.work_rate


def main(arguments: list[str]) -> int:
    """Print the bound of each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    options = parser.parse_args(arguments)
    trace = load_trace(options.trace)
    sampled = sample_nodes(trace, NODE_SHARE, 0)
    for name, preset in presets().items():
        share = engine_share(preset)
        found = []
        for start, end in windows_of(trace):
            window = sampled.window(start, end)
            bound, oracle = (
                simulate_oracle(preset, window, LENGTH_SEED, WINDOW_S / 3_600.0, engine_share=each)
                for each in (share, 1.0)
            )
            found.append(bound.tokens_per_s / oracle.tokens_per_s)
        line = {"preset": name, "engine_share": round(share, 3), "of_oracle": round(mean(found), 3)}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
