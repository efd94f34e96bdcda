"""What an event costs as the fleet grows: one step through the real core with up to 1,000 machines.

    python -m benchmarks.scheduler.scale --machines 10 100 1000 --out scale.jsonl

Each machine gets 100 responses. One line of JSON per size: CPU seconds in all, microseconds of `Core.handle`
per event, without the simulated engines, and, up to `COUNTED_UP_TO` machines, Python calls per event, which
do not depend on the machine that counts them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from benchmarks.paper.static import constant_trace
from rlboost_runtime.core.base.messages import Command, Event, Heartbeat
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.rules import Rules
from rlboost_runtime.sim import Preset, presets
from rlboost_runtime.sim.policies import Switches, baseline_rules, policy_setup
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.world import World

RESPONSES_PER_MACHINE = 100
GROUP_SIZE = 8
COUNTED_UP_TO = 300
"""Machines: counting calls takes several times as long as the step itself."""


class TimedCore(Core):
    """A core that adds up the CPU time of its events; heartbeats apart, whose cost depends on what they
    report."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.event_s = 0.0
        self.beat_s = 0.0
        self.num_beats = 0

    def handle(self, event: Event) -> list[Command]:
        """Take in an event."""
        began = time.process_time()
        commands = super().handle(event)
        seconds = time.process_time() - began
        if isinstance(event, Heartbeat):
            self.beat_s += seconds
            self.num_beats += 1
        else:
            self.event_s += seconds
        return commands


class CountedCore(Core):
    """A core that counts the Python calls of its events, heartbeats apart: what an event costs in work."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.num_calls = 0
        self.num_events = 0

    def handle(self, event: Event) -> list[Command]:
        """Take in an event."""
        if isinstance(event, Heartbeat):
            return super().handle(event)
        self.num_events += 1
        sys.setprofile(self._count)
        try:
            return super().handle(event)
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, what: str, argument: object) -> None:
        self.num_calls += what in ("call", "c_call")


def calls_per_event(preset: Preset, machines: int, policy: str, responses_per_machine: int) -> float:
    """Simulate one step on a fleet of that size; return the mean Python calls of an event."""
    world = _world(preset, machines, policy, responses_per_machine)
    core = world.core = CountedCore(baseline_rules())
    world.run(1e9, max_steps=1)
    return core.num_calls / core.num_events


def one_step(preset: Preset, machines: int, policy: str) -> dict[str, float]:
    """Simulate one step on a fleet of that size."""
    world = _world(preset, machines, policy, RESPONSES_PER_MACHINE)
    core = world.core = TimedCore(baseline_rules())
    began = time.process_time()
    world.run(1e9, max_steps=1)
    events = world.num_events - core.num_beats
    return {
        "machines": machines,
        "responses": machines * RESPONSES_PER_MACHINE // GROUP_SIZE * GROUP_SIZE,
        "cpu_s": round(time.process_time() - began, 2),
        "events": events,
        "us_per_event": round(1e6 * core.event_s / events, 1),
        "beats": core.num_beats,
        "us_per_beat": round(1e6 * core.beat_s / core.num_beats, 1),
    }


def _world(preset: Preset, machines: int, policy: str, responses_per_machine: int) -> World:
    workload = Workload(prompts=machines * responses_per_machine // GROUP_SIZE, group_size=GROUP_SIZE)
    large = replace(preset, workload=workload, max_spot_instances=machines)
    return World(large, constant_trace(machines), policy_setup(policy, large, Switches()), seed=0)


def as_markdown(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a section of the report."""
    if not rows:
        return ["What an event costs as the fleet grows has not been measured."]
    lines = [
        f"| {r['machines']:,} | {r['responses']:,} | {r['cpu_s']:.0f} | {r['us_per_event']:.0f} |"
        f" {r.get('calls_per_event', math.nan):.0f} | {r['us_per_beat']:.0f} |".replace(" nan ", "  ")
        for r in sorted(rows, key=lambda r: r["machines"])
    ]
    return [
        "## What an event costs as the fleet grows",
        "",
        "One step, 100 responses per machine. Events without heartbeats; a heartbeat costs what it tells.",
        "",
        "| machines | responses | CPU s, all | us per event | calls per event | us per heartbeat |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def main(arguments: list[str]) -> int:
    """Run the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[10, 30, 100, 300, 1_000])
    parser.add_argument("--policy", default="rlboost")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    preset = presets()["paper-8b"]
    lines = []
    for machines in options.machines:
        row = one_step(preset, machines, options.policy)
        if machines <= COUNTED_UP_TO:
            calls = calls_per_event(preset, machines, options.policy, RESPONSES_PER_MACHINE)
            row["calls_per_event"] = round(calls, 1)
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
