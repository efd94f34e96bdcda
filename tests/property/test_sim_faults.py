"""Promises 1 to 4 in random lives with random faults; `benchmarks.scheduler.faults` runs thousands."""

from __future__ import annotations

import pytest

from rlboost_runtime.sim.faults import run_with_faults

pytestmark = pytest.mark.property


@pytest.mark.parametrize("seed", range(12))
def test_promises_hold_under_faults(seed: int) -> None:
    assert run_with_faults(seed).steps >= 1


def test_a_seed_replays() -> None:
    assert run_with_faults(3) == run_with_faults(3)
