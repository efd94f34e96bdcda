"""What a token of one more spot machine costs, by hand; and machines that are counted by their engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlboost_runtime.core.base.cost_model import Prices
from rlboost_runtime.core.base.messages import LaunchMachine, MachineGone, MachineLaunched
from rlboost_runtime.core.base.token_cost import (
    BOOT_S,
    LIFE_S,
    MachineKind,
    Measured,
    PlaceRecord,
    usd_per_token,
)

FAST, SLOW = MachineKind("H100", 4, 2e12, "a"), MachineKind("A100", 4, 1e12, "b")
SEEN = Measured({"H100": (1_000.0, 2e12)}, {"a": PlaceRecord(LIFE_S, 1, 2, 200.0)}, 100.0, 1e9, 16e9)


def test_price_boot_and_every_version_are_paid_by_the_tokens_of_the_time_it_serves() -> None:
    served_s = LIFE_S - 100.0
    paid = 36.0 / 3600 * LIFE_S + 0.1 * (16 + served_s / 100.0)
    assert usd_per_token(FAST, 36.0, 0.1, SEEN) == pytest.approx(paid / (served_s * 4_000))


def test_before_a_run_bandwidth_decides_and_versions_are_whole() -> None:
    before = Measured(whole_bytes=16e9)
    assert usd_per_token(FAST, 10.0, 0.0, before) * 2 == pytest.approx(usd_per_token(SLOW, 10.0, 0.0, before))
    served_s = LIFE_S - BOOT_S
    paid = 10.0 / 3600 * LIFE_S + 0.12 * 16 * (1 + served_s / 600.0)
    assert usd_per_token(FAST, 10.0, 0.12, before) == pytest.approx(paid / (served_s * 4 * 2e12))


def test_egress_of_whole_weights_outweighs_a_cheaper_machine_and_that_of_deltas_does_not() -> None:
    near, far = (FAST, 7.0, 0.01), (FAST, 4.0, 0.12)
    deltas = replace(SEEN, step_s=600.0)
    whole = replace(deltas, version_bytes=16e9)
    assert usd_per_token(*near, whole) < usd_per_token(*far, whole)
    assert usd_per_token(*near, deltas) > usd_per_token(*far, deltas)


def test_one_measurement_scales_gpus_that_the_run_has_not_had() -> None:
    assert SEEN.tokens_per_s(SLOW) == pytest.approx(4 * 500.0)
    both = replace(SEEN, engine_tokens_per_s={**SEEN.engine_tokens_per_s, "A100": (900.0, 1e12)})
    assert both.tokens_per_s(SLOW) == 4 * 900.0


def test_a_place_that_takes_its_machines_soon_is_dearer_or_worth_nothing() -> None:
    often = replace(SEEN, places={"a": PlaceRecord(4_000.0, 20, 4, 400.0)})
    assert usd_per_token(FAST, 36.0, 0.1, often) > usd_per_token(FAST, 36.0, 0.1, SEEN)
    at_once = replace(SEEN, places={"a": PlaceRecord(0.0, 100, 4, 400.0)})
    assert usd_per_token(FAST, 36.0, 0.1, at_once) == float("inf")


def test_boots_of_other_places_stand_for_those_of_one_that_was_not_tried() -> None:
    assert (SEEN.boot_s("a"), SEEN.boot_s("b"), Measured().boot_s("b")) == (100.0, 100.0, BOOT_S)


def test_machines_count_as_the_engines_that_they_bring(new_run: Callable[..., Any]) -> None:
    run = new_run(
        max_spot_instances=8, instances_per_machine=4, prices=Prices(40.0, 4.0), reserved_instances=8
    )
    asked = [c.machine for c in run.commands if isinstance(c, LaunchMachine)]
    assert asked == ["spot-0", "spot-1"], "eight engines, four on each"
    larger = new_run(max_spot_instances=8, reserved_instances=8)
    assert sum(isinstance(c, LaunchMachine) for c in larger.commands) == 8
    core = larger.core
    core.handle(MachineLaunched(1.0, "spot-0", MachineKind("H100", 8, 1e12, "a")))
    core.check()
    assert core._fleet.superfluous(8, 8, lambda _: 0) == [], "the other seven machines have one engine each"
    assert [m.machine for m in core._fleet.superfluous(7, 8, lambda _: 0)] == ["spot-0"]
    core.handle(MachineGone(101.0, "spot-0"))
    core.check()
    assert core.measured().places["a"] == PlaceRecord(100.0, 1)
