"""A simulated trainer that restarts has its steps again, and nothing is generated twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.ettr.failures import KINDS, WARM_UP_STEPS, Failure, failures
from benchmarks.ettr.simulated import Measured, Simulated
from rlboost_runtime.sim.presets import Preset, Workload, presets

STEPS = 4


def preset(max_staleness: int = 0, *, in_flight_updates: bool = False) -> Preset:
    workload = Workload(
        prompts=8, max_response_tokens=2_000, max_staleness=max_staleness, in_flight_updates=in_flight_updates
    )
    return replace(presets()["paper-8b"], workload=workload)


def lived(of: Preset, *planned: Failure) -> tuple[Measured, Simulated]:
    simulated = Simulated(of, list(planned), STEPS, 0, step_s=40.0, restore_s=30.0)
    return simulated.run(), simulated


def end_s(simulated: Simulated) -> float:
    last = simulated.world.recorder.rows[-1]
    return last.started_s + last.seconds


PRESETS = [preset(), preset(1), preset(2, in_flight_updates=True)]


@pytest.mark.parametrize("of", PRESETS, ids=["on-policy", "staleness", "in-flight"])
@pytest.mark.parametrize("at", [0.1, 0.9])
def test_a_restarted_trainer_trains_the_same_tokens_later(of: Preset, at: float) -> None:
    """Less than starting the step over would take, and no token that was received is generated again."""
    undisturbed, whole = lived(of)
    restarted, simulated = lived(of, Failure(WARM_UP_STEPS + 1, at, "trainer"))
    assert restarted.failures == 1
    assert restarted.tokens == undisturbed.tokens
    assert 1.0 < end_s(simulated) - end_s(whole) < 70.0
    assert simulated.world.tokens_lost() == 0


def test_a_machine_that_is_taken_costs_less_than_a_trainer() -> None:
    undisturbed, _ = lived(preset())
    seconds = {kind: lived(preset(), Failure(WARM_UP_STEPS + 1, 0.5, kind))[0].seconds for kind in KINDS}
    assert seconds["machine"] < seconds["trainer"]
    assert seconds["coordinator"] < seconds["trainer"]
    assert seconds["trainer"] > undisturbed.seconds


def test_a_share_of_failures_is_that_share_and_begins_after_the_warm_up() -> None:
    planned = failures(100, 0.1, seed=3)
    assert len(planned) == len({failure.step for failure in planned}) == 10
    assert min(failure.step for failure in planned) >= WARM_UP_STEPS
    assert {failure.kind for failure in planned} == set(KINDS)
    assert failures(100, 0.0, seed=3) == []
