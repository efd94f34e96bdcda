"""What the core decides in recorded simulations, so that no change of a rule goes unseen.

The record, `decisions.json`, says nothing about which decisions are good. Where a change is meant:

    PYTHONPATH=. python tests/unit/core/test_decisions.py

writes it again; the commit's message says what the change brings (`benchmarks/paper`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlboost_runtime.core.base.autoscaling import Autoscaling
from rlboost_runtime.core.base.messages import Command, Event
from rlboost_runtime.core.base.prior import Prior
from rlboost_runtime.core.core import Core
from rlboost_runtime.sim.faults import random_market, run_with_faults
from rlboost_runtime.sim.policies import RLBOOST, Switches, policy_setup
from rlboost_runtime.sim.presets import Preset, Turns, Workload, presets
from rlboost_runtime.sim.serving import ServingWorld, Traffic
from rlboost_runtime.sim.world import World

RECORD = Path(__file__).with_name("decisions.json")
KNOWN = presets()["paper-8b"]
STEPS = 10


class Seen:
    """What is recorded of one simulation."""

    def __init__(self) -> None:
        self._commands: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=12)

    def __call__(self, event: Event, commands: list[Command]) -> None:
        for command in commands:
            self._commands[type(command).__name__] += 1
            self._add(command)

    def _add(self, what: object) -> None:
        self._digest.update(_rounded(repr(what)).encode())

    def of(self, core: Core, steps: list[float]) -> dict[str, Any]:
        """Return the record."""
        for row in core.instances.values(), core.machines.values():
            for each in row:
                self._add((each.lifecycle.state, list(each.lifecycle.history)))
        self._add(core.prior())
        counters = {each.name: getattr(core.counters, each.name) for each in fields(core.counters)}
        return {
            "commands": dict(sorted(self._commands.items())),
            "counters": {name: value for name, value in counters.items() if value},
            "step_s": [round(seconds, 3) for seconds in steps],
            "digest": self._digest.hexdigest(),
        }


def _rounded(text: str) -> str:
    """Mathematics libraries differ in the last digit of a logarithm."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.6g}", text)


def _small(**changes: Any) -> Preset:
    workload = Workload(prompts=6, group_size=8, prompt_tokens=200, max_response_tokens=3_000)
    workload = replace(workload, **{key: changes.pop(key) for key in list(changes) if hasattr(workload, key)})
    assumptions = replace(KNOWN.assumptions, length_median=900.0, boot_s=10.0, max_running=16)
    names = [key for key in changes if hasattr(assumptions, key)]
    assumptions = replace(assumptions, **{key: changes.pop(key) for key in names})
    small = replace(KNOWN, workload=workload, assumptions=assumptions, seeding_initial_s=8.0)
    return replace(small, **changes)


def _steps(preset: Preset, seed: int, prior: Prior | None = None) -> tuple[dict[str, Any], Core]:
    seen = Seen()
    setup = policy_setup(RLBOOST.name, preset, Switches())
    market = random_market(Random(f"decisions/{seed}"))
    world = World(preset, market, setup, seed, watch=seen, prior=prior)
    world.run(1e5, max_steps=STEPS)
    return seen.of(world.core, [row.seconds for row in world.recorder.rows]), world.core


def _with_prior() -> dict[str, Any]:
    _, core = _steps(_small(), 5)
    return _steps(_small(), 6, core.prior())[0]


def _small_cache() -> dict[str, Any]:
    weights, room = KNOWN.model.weight_bytes, 6.4 * 3_400 * KNOWN.model.kv_bytes_per_token
    share = (weights + room) / (2 * KNOWN.spot[0].gpu.memory_bytes)
    return _steps(_small(spot_memory_share=share, reserved_memory_share=share), 2)[0]


def _unlike() -> dict[str, Any]:
    fast = KNOWN.spot[0]
    half = replace(fast.gpu, name="half", bandwidth=0.5 * fast.gpu.bandwidth)
    slow = replace(fast, gpu=half, usd_per_hour=0.4 * fast.usd_per_hour)
    return _steps(_small(spot=(fast, slow)), 3)[0]


def _serving() -> dict[str, Any]:
    seen = Seen()
    preset = _small(engines_per_reserved_node=1, max_running=8)
    rule = Autoscaling(max_instances=4, max_wait_s=5.0, idle_s=60.0)
    setup = policy_setup(RLBOOST.name, preset, Switches())
    config = replace(setup.config, autoscaling=rule, max_spot_instances=rule.max_instances)
    traffic = Traffic(1.0, swing=0.9, period_s=300.0, mean_tokens=1500.0)
    market = random_market(Random("decisions/serving"))
    world = ServingWorld(preset, market, replace(setup, config=config), traffic, 1, watch=seen)
    world.serve(360.0)
    return seen.of(world.core, [])


def _faults(seed: int) -> dict[str, Any]:
    report = run_with_faults(seed, RLBOOST.name)
    return {"steps": report.steps, "kills": report.kills, "digest": report.commands_digest}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "steps": lambda: _steps(_small(), 0)[0],
    "single responses": lambda: _steps(_small(trains_whole_groups=False), 1)[0],
    "small cache": _small_cache,
    "unlike machines": _unlike,
    "one step ahead": lambda: _steps(_small(max_staleness=1), 4)[0],
    "in flight": lambda: _steps(_small(max_staleness=2, in_flight_updates=True), 5)[0],
    "episodes": lambda: _steps(_small(turns=Turns(4.0, 100.0, 0.5, 16)), 6)[0],
    "episodes in flight": lambda: _steps(
        _small(turns=Turns(3.0, 50.0, 0.5, 16), max_staleness=1, in_flight_updates=True), 7
    )[0],
    "few long responses": lambda: _steps(_small(prompts=2, max_running=4, length_median=2_000.0), 8)[0],
    "with a prior": _with_prior,
    "serving": _serving,
}  # fmt: skip
CASES |= {f"faults {seed}": lambda seed=seed: _faults(seed) for seed in range(8)}


@pytest.mark.parametrize("case", CASES)
def test_the_core_decides_as_recorded(case: str) -> None:
    assert CASES[case]() == json.loads(RECORD.read_text())[case], "a rule changed: see above"


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: make() for name, make in CASES.items()}, indent=1) + "\n")
