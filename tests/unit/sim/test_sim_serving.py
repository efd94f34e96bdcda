"""A served model in virtual time: the fleet follows its load, and every request is answered."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from rlboost_runtime.core.base.autoscaling import Autoscaling
from rlboost_runtime.sim.presets import Preset, presets
from rlboost_runtime.sim.serving import ServingResult, Traffic, simulate_serving
from rlboost_runtime.traces import Trace, TraceEvent

RULE = Autoscaling(max_instances=8, max_wait_s=5.0, idle_s=120.0)
TRAFFIC = Traffic(1.0, swing=0.9, period_s=1200.0, mean_tokens=3000.0)
HOURS = 0.35


def small(preset: Preset) -> Preset:
    """Engines of 8 slots and one reserved one, so that few requests fill the fleet."""
    assumptions = replace(preset.assumptions, max_running=8, boot_s=60.0)
    return replace(preset, engines_per_reserved_node=1, assumptions=assumptions)


PRESET = small(presets()["paper-8b"])


def market(nodes: int, life_s: float = 0.0) -> Trace:
    """Return nodes that come at the start; with `life_s` each is taken after that, one after the other."""
    events = [TraceEvent(0.0, f"n{k}", "add") for k in range(nodes)]
    for k in range(nodes if life_s else 0):
        at = life_s * (k + 1)
        events += [TraceEvent(at, f"n{k}", "remove"), TraceEvent(at + 30.0, f"n{k}", "add")]
    return Trace("t", "made", tuple(sorted(events, key=lambda e: e.at_s)), 3600.0)


def served(trace: Trace, rule: Autoscaling = RULE, traffic: Traffic = TRAFFIC, **rest) -> ServingResult:
    return simulate_serving(PRESET, trace, rule, traffic, seed=1, hours=HOURS, **rest)


@pytest.fixture(scope="module")
def followed() -> ServingResult:
    return served(market(8))


def test_the_fleet_follows_a_load_that_swings(followed: ServingResult) -> None:
    wanted = [count for _, count in followed.wanted]
    assert max(wanted) >= 2
    assert min(wanted[wanted.index(max(wanted)) :]) < max(wanted), "it shrinks again"
    steps = [after - before for before, after in pairwise(wanted)]
    turns = sum(before * after < 0 for before, after in pairwise(steps))
    assert turns <= 8, f"it flaps: {followed.wanted}"
    assert followed.arrived - followed.finished < 60


def test_following_costs_less_than_the_full_fleet_and_waits_hardly_longer(followed: ServingResult) -> None:
    full = served(market(8), replace(RULE, min_instances=8))
    assert followed.usd < full.usd
    assert followed.wait_s(0.5) < 1.0
    assert followed.wait_s(0.99) < full.wait_s(0.99) + 60.0


def test_preempted_machines_lose_no_request() -> None:
    found = served(market(8, life_s=200.0))
    assert found.preemptions > 0
    assert found.arrived - found.finished < 80


def test_without_spot_machines_the_floor_serves_what_it_can() -> None:
    traffic = replace(TRAFFIC, requests_per_s=0.2, swing=0.0)
    found = served(market(0), traffic=traffic)
    assert found.mean_spot_machines == 0
    assert found.arrived > 200
    assert found.arrived - found.finished < 20


def test_the_same_seed_gives_the_same_minutes() -> None:
    traffic = replace(TRAFFIC, requests_per_s=0.2)
    assert served(market(2), traffic=traffic) == served(market(2), traffic=traffic)
