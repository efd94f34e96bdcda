"""A run that begins with what a former one measured. Simulated."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.paper.static import constant_trace
from rlboost_runtime.coordinator.storage.journal import decode_event, encode_event
from rlboost_runtime.core.base.messages import CoreConfig, RunStarted, SizeRule
from rlboost_runtime.core.base.prior import EnginePrior, GpuPrior, Prior, WindowPrior
from rlboost_runtime.core.core import Core
from rlboost_runtime.core.state.rates import Lengths, spread
from rlboost_runtime.sim import Switches, presets
from rlboost_runtime.sim.policies import policy_setup
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.world import World

MACHINES = 3
PRIOR = Prior(
    num_steps=4,
    window=WindowPrior(12.5, n_prem=2.5, train_s_per_token=1e-3, tokens_per_s=100.0),
    lengths=(1, 10, 100),
    engines=(EnginePrior(100_000, 16, 1e-7, 0.02),),
    gpus=(GpuPrior("H100", 5e3, 3e12),),
    step_s=60.0,
    version_bytes=16_000,
)


def world(steps: int, prior: Prior | None, seed: int, sizing: SizeRule = SizeRule.MARGINAL) -> World:
    known = presets()["paper-8b"]
    preset = replace(known, workload=Workload(prompts=32), max_spot_instances=MACHINES)
    setup = policy_setup("rlboost", preset, Switches())
    policy = replace(setup.config.policy, sizing=sizing)
    setup = replace(
        setup, config=replace(setup.config, seeding_initial_s=10.0, policy=policy)
    )  # as jobs have it
    run = World(preset, constant_trace(MACHINES), setup, seed, prior=prior)
    run.run(math.inf, steps)
    return run


@cache
def learned() -> Prior:
    prior = world(4, None, seed=1).core.prior()
    assert prior is not None
    return prior


def test_nothing_is_handed_on_before_a_step_has_taught_anything():
    core = Core()
    core.handle(RunStarted(0.0, CoreConfig(max_spot_instances=3), prior=PRIOR))
    assert core.prior() is None
    assert core.num_prior_steps == 4


def test_the_first_step_after_a_like_run_plans_its_window_and_is_faster():
    cold, warm = (world(1, p, 2, SizeRule.CAP).recorder.rows[0] for p in (None, learned()))
    assert cold.t_seed_s == 10.0  # the job's: nothing better is known
    assert warm.t_seed_s > 60.0
    assert warm.wait_s < 0.5 * cold.wait_s
    assert warm.seconds < 0.97 * cold.seconds


def test_a_like_run_begins_with_the_fleet_that_pays():
    cold, warm = (world(4, prior, 2).recorder.rows for prior in (None, learned()))
    assert warm[0].useful_instances == cold[-1].useful_instances < cold[0].useful_instances
    assert sum(row.usd for row in warm) < sum(row.usd for row in cold)


def test_a_wrong_prior_is_outweighed_by_the_runs_own_steps():
    true = learned()
    slow = replace(true.window, train_s_per_token=10 * (true.window.train_s_per_token or 0.0))
    wrong = replace(true, window=slow, lengths=tuple(max(1, n // 4) for n in true.lengths))
    right, misled = (world(5, prior, 3, SizeRule.CAP).recorder.rows for prior in (None, wrong))
    assert misled[-1].seconds < 1.05 * right[-1].seconds


def test_lengths_of_the_first_steps_are_handed_on_and_not_those_of_the_last():
    lengths = Lengths()
    lengths.begin_with([7] * 600)
    lengths.learn([10] * 600)
    lengths.learn([1_000] * 600)
    assert set(lengths.first) == {10}
    assert lengths.longest == 1_000.0


def test_many_lengths_are_thinned_to_the_same_distribution():
    thinned = spread(range(10_000), 100)
    assert len(thinned) == 100
    assert abs(sum(thinned) / 100 - 4_999.5) < 50
    assert spread([5, 3], 100) == (3, 5)
    assert spread([], 100) == ()


def test_the_event_log_keeps_the_prior_exactly():
    event = RunStarted(0.0, CoreConfig(max_spot_instances=3), "boot", learned())
    assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_numbers_that_cannot_be_are_named(bad):
    assert PRIOR.problem() is None
    assert replace(PRIOR, window=replace(PRIOR.window, wake_s=bad)).problem() == f"wake_s is {bad}"
    assert "kv_token_s" in str(replace(PRIOR, engines=(EnginePrior(1, 1, bad, 0.0),)).problem())
