"""The predicted window in a simulated run: right in the very step after the fleet changed."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from rlboost_runtime.sim import Preset, presets, simulate
from rlboost_runtime.sim.presets import Workload
from rlboost_runtime.sim.result import StepRow
from rlboost_runtime.traces import Trace, TraceEvent

STEPS, NODES = 7, 6


def job(machines: int, *, whole_groups: bool) -> Preset:
    known = presets()["paper-14b"]
    dear = replace(known.reserved, usd_per_hour=1e5)  # every machine pays
    workload = Workload(prompts=48)
    return replace(
        known, reserved=dear, workload=workload, max_spot_instances=machines, seeding_initial_s=50.0,
        assumptions=replace(known.assumptions, trains_whole_groups=whole_groups),
    )  # fmt: skip


def lived(machines: int, taken: int = 0, at_s: float = 0.0, *, whole_groups: bool) -> tuple[StepRow, ...]:
    """Live some steps; `taken` machines go at `at_s` and stay away."""
    events = [TraceEvent(0.0, f"node{i}", "add") for i in range(NODES)]
    events += [TraceEvent(at_s, f"node{i}", "remove") for i in range(taken)]
    trace = Trace("change", "made for tests", tuple(events), 1e5)
    return simulate(
        job(machines, whole_groups=whole_groups), trace, "rlboost", seed=0, hours=20.0, max_steps=STEPS
    ).rows


@pytest.mark.parametrize("left", [1, 3])
@pytest.mark.parametrize(("whole_groups", "within"), [(False, 0.10), (True, 0.20)])
def test_one_step_after_machines_went_the_window_is_where_it_settles(
    left: int, whole_groups: bool, within: float
) -> None:
    """With whole groups the window itself goes on by as much from step to step."""
    before = lived(NODES, whole_groups=whole_groups)
    changed_at = before[3].started_s + 1.0
    after = lived(NODES, NODES - left, changed_at, whole_groups=whole_groups)
    settled = lived(left, whole_groups=whole_groups)  # same responses, never another fleet
    first = next(row for row in after if row.started_s > changed_at)
    assert first.spot_instances == left
    assert first.seeded_s > 1.25 * before[first.step].seeded_s, "it has far to go"
    windows = [row.seeded_s for row in settled[first.step :]]  # one of them is up to 9 % off their mean
    assert first.seeded_s == pytest.approx(fmean(windows), rel=within)
