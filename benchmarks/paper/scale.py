"""What an event costs as the fleet grows: one step through the real core with up to 1,000 machines.

    python -m benchmarks.paper.scale --machines 10 100 1000

Each machine gets 100 responses. Prints CPU seconds in all and microseconds of `Core.handle` per event,
without the simulated engines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace

from benchmarks.paper.static import constant_trace
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.messages import Beat, Command, Event
from rlboost_runtime.sim import Preset, presets
from rlboost_runtime.sim.policies import policy_setup
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.switches import Switches
from rlboost_runtime.sim.world import World

RESPONSES_PER_MACHINE = 100
GROUP_SIZE = 8


class TimedCore(Core):
    """A core that adds up the CPU time of its events; heartbeats apart, whose cost is that of what they
    tell."""

    def __init__(self) -> None:
        super().__init__()
        self.event_s = 0.0
        self.beat_s = 0.0
        self.num_beats = 0

    def handle(self, event: Event) -> list[Command]:
        """Take in an event."""
        began = time.process_time()
        commands = super().handle(event)
        seconds = time.process_time() - began
        if isinstance(event, Beat):
            self.beat_s += seconds
            self.num_beats += 1
        else:
            self.event_s += seconds
        return commands


def one_step(preset: Preset, machines: int, policy: str) -> dict[str, float]:
    """Simulate one step on a fleet of that size."""
    prompts = machines * RESPONSES_PER_MACHINE // GROUP_SIZE
    large = replace(
        preset, workload=Workload(prompts=prompts, group_size=GROUP_SIZE), max_spot_instances=machines
    )
    world = World(large, constant_trace(machines), policy_setup(policy, large, Switches()), seed=0)
    core = world.core = TimedCore()
    began = time.process_time()
    world.run(1e9, max_steps=1)
    events = world.num_events - core.num_beats
    return {
        "machines": machines,
        "responses": prompts * GROUP_SIZE,
        "cpu_s": round(time.process_time() - began, 2),
        "events": events,
        "us_per_event": round(1e6 * core.event_s / events, 1),
        "beats": core.num_beats,
        "us_per_beat": round(1e6 * core.beat_s / core.num_beats, 1),
    }


def main(arguments: list[str]) -> int:
    """Run the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[10, 30, 100, 300, 1_000])
    parser.add_argument("--policy", default="rlboost")
    options = parser.parse_args(arguments)
    for machines in options.machines:
        print(json.dumps(one_step(presets()["paper-8b"], machines, options.policy)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
