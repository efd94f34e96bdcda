"""Fleet size by marginal dollars: the model by hand, and the rule in a core."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlboost_runtime.core.base.cost_model import (
    Prices,
    StepRates,
    cheapest_machines,
    rollout_s,
    step_s,
    step_usd,
)
from rlboost_runtime.core.base.messages import RLBOOST, CoreConfig, SizeRule
from rlboost_runtime.core.window.seeding_window import worthwhile_instances

RATES = StepRates(tokens=1e6, shared_s=800.0, reserved_engines=4.0, train_s=100.0)
PRICES = Prices(reserved_usd_per_hour=40.0, spot_usd_per_hour=4.0)


def test_engines_that_are_not_full_bring_less() -> None:
    rates = replace(RATES, chain_s=50.0, steps_s=200.0)
    assert rollout_s(rates, 2) == 400.0 + 100.0, "full: their decode steps are shared too"
    assert rollout_s(rates, 8) == 100.0 + 50.0, "the longest response is as long as ever"
    assert rollout_s(rates, 0) == math.inf


def test_steps_by_hand() -> None:
    assert step_s(RATES, 0) == 800.0 / 4 + 100.0
    assert step_s(RATES, 8) == 100.0, "rollout and training take the same"
    assert step_s(RATES, 16) == 100.0, "more would only wait"
    window = 100.0 * (
        1.0 - 100.0 / 200.0
    )  # with 4: together 100 s, alone 200 s, of which training covers half
    assert step_s(RATES, 4) == window + 100.0
    assert step_s(replace(RATES, fixed_s=7.0), 8) == 107.0
    assert step_s(replace(RATES, start_s=30.0), 8) == 130.0, "nothing is finished yet"
    both = (30.0**3 + window**3) ** (1 / 3)
    assert window < both < window + 30.0
    assert step_s(replace(RATES, start_s=30.0), 4) == pytest.approx(both + 100.0), "neither hides the other"
    assert step_s(replace(RATES, reserved_engines=0.0), 4) == 200.0
    assert step_s(replace(RATES, reserved_engines=0.0), 0) == math.inf


def test_no_window_is_opened_that_would_not_outlast_waking() -> None:
    rates = replace(RATES, wake_s=10.0)
    assert step_s(rates, 7) == pytest.approx(10.0 + 800.0 / 11 * (1.0 - 110.0 / (800.0 / 7)) + 100.0)
    assert step_s(replace(rates, wake_s=20.0), 7) == 800.0 / 7


@pytest.mark.parametrize(
    ("spot", "egress", "best"),
    [
        (4.0, 0.0, 8),
        (9.9, 0.0, 8),  # 10 $/h is what a reserved engine costs
        (10.01, 0.0, 8),  # a thousandth dearer: for nothing twice as fast
        (12.0, 0.0, 0),
        (45.0, 0.0, 0),
        (4.0, 0.003, 8),
        (4.0, 0.006, 5),
        (4.0, 1.0, 0),
    ],
)
def test_dear_machines_and_dear_weights_make_the_fleet_smaller(spot: float, egress: float, best: int) -> None:
    prices = Prices(40.0, spot, egress)
    assert cheapest_machines(RATES, prices, 12, 1, 16e9) == best


def test_a_machine_of_two_instances_pulls_once() -> None:
    assert step_usd(RATES, Prices(0.0, 0.0, 0.5), 3, 2, 1e9) == 1.5


def test_the_rule_needs_prices_and_rates_and_never_wants_none() -> None:
    config = CoreConfig(max_spot_instances=12, instances_per_machine=2, prices=PRICES)
    assert RLBOOST.sizing is SizeRule.MARGINAL
    assert worthwhile_instances(3.0, RATES, 0.0, config) == 8
    assert worthwhile_instances(3.0, None, 0.0, config) == 2, "one machine is filled by three instances"
    assert worthwhile_instances(1.0, None, 0.0, config) == 2
    assert worthwhile_instances(None, None, 0.0, config) == 6, "of six machines, one instance for each"
    assert worthwhile_instances(None, None, 0.0, replace(config, reserved_instances=8)) == 8
    assert worthwhile_instances(None, None, 0.0, replace(config, max_spot_instances=0)) == 0
    assert worthwhile_instances(3.0, RATES, 0.0, replace(config, prices=Prices())) == 3
    dear = replace(config, prices=Prices(40.0, 400.0))
    assert worthwhile_instances(3.0, RATES, 0.0, dear) == 2, "one machine: else nothing teaches that it pays"
    assert worthwhile_instances(3.0, RATES, 0.0, replace(dear, max_spot_instances=0)) == 0
