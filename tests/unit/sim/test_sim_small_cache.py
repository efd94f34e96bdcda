"""An engine that preempts when its KV cache is full, under the scheduler that books for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_runtime.sim import Switches, presets
from rlboost_runtime.sim.policies import policy_setup
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.world import World
from rlboost_runtime.traces import Trace, TraceEvent

LIMIT, RESPONSES = 4_096, 64


@pytest.mark.parametrize("books_whole", [True, False])
def test_with_a_cache_for_four_responses_no_engine_preempts(books_whole: bool) -> None:
    known = presets()["paper-8b"]
    weights, room = known.model.weight_bytes, 4.4 * (LIMIT + 384) * known.model.kv_bytes_per_token
    share = (weights + room) / (2 * known.spot[0].gpu.memory_bytes)
    assumptions = replace(
        known.assumptions, spot_memory_share=share, reserved_memory_share=share, length_median=2_500.0
    )
    small = replace(
        known,
        workload=Workload(prompts=RESPONSES // 8, group_size=8, max_response_tokens=LIMIT),
        assumptions=assumptions,
        calibration=replace(known.calibration, growth_headroom_tokens=0),  # as vLLM admits
        max_spot_instances=2,
    )
    setup = policy_setup("rlboost", small, Switches())
    rules = replace(setup.config.policy, fits_small_caches=books_whole)
    market = Trace("two", "for tests", tuple(TraceEvent(0.0, f"n{i}", "add") for i in range(2)), 1e6)
    world = World(small, market, replace(setup, config=replace(setup.config, policy=rules)), seed=0)
    world.run(1e6, max_steps=1)
    engines = [agent.engine for agent in world.agents()]
    assert all(4 * LIMIT < engine.speed.kv_tokens < 5 * (LIMIT + 384) for engine in engines)
    preemptions = sum(engine.preemptions for engine in engines)
    assert (preemptions == 0) if books_whole else (preemptions > 10)
