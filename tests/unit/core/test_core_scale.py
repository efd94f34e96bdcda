"""What an event costs the core as the fleet grows: counted in Python calls, so that a busy machine changes
nothing."""

from __future__ import annotations

import pytest

from benchmarks.scheduler.scale import calls_per_event
from rlboost_runtime.sim import presets

SMALL, LARGE, RESPONSES_PER_MACHINE = 8, 64, 16
LIMIT = 1.2
"""log 64 / log 8 is 2."""


@pytest.mark.parametrize("policy", ["paper", "polyrl", "rlboost"])
def test_an_event_costs_at_most_logarithmically_more_on_a_larger_fleet(policy: str) -> None:
    preset = presets()["paper-8b"]
    small = calls_per_event(preset, SMALL, policy, RESPONSES_PER_MACHINE)
    large = calls_per_event(preset, LARGE, policy, RESPONSES_PER_MACHINE)
    assert large / small < LIMIT, "one call per instance and event would make it 1.3 already"


def test_a_long_queue_does_not_make_events_dearer() -> None:
    preset = presets()["paper-8b"]
    small = calls_per_event(preset, SMALL, "rlboost", 10)
    large = calls_per_event(preset, 250, "rlboost", 10)
    assert large / small < 1.4, "1.5 where each look for one to give way goes through all that wait"
