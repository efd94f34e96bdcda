from __future__ import annotations

from dataclasses import replace

import pytest

from rlboost_runtime.sim.oracle import StepDemand, integral, oracle_step_s

DEMAND = StepDemand(work=1_000.0, reserved_rate=10.0, train_s=40.0, fixed_s=10.0, longest_s=5.0, pull_s=3.0)


def test_without_spot_the_reserved_engines_do_everything_and_then_train() -> None:
    assert oracle_step_s(DEMAND, []) == pytest.approx(1_000 / 10 + 50)
    assert oracle_step_s(DEMAND, [(0.0, 0.0)]) == pytest.approx(150.0)


def test_constant_capacity() -> None:
    # 10 (S - 50) + 20 S = 1000
    assert oracle_step_s(DEMAND, [(0.0, 20.0)]) == pytest.approx(50.0)
    assert oracle_step_s(DEMAND, [(0.0, 10.0)]) == pytest.approx(75.0)


def test_capacity_that_comes_late() -> None:
    # reserved: 10 (S - 50); spot: 30 from second 60 on
    assert oracle_step_s(DEMAND, [(0.0, 0.0), (60.0, 30.0)]) == pytest.approx(60 + 900 / 40)


def test_capacity_that_goes() -> None:
    # 20 for 30 s, then none: 10 (S - 50) = 400
    assert oracle_step_s(DEMAND, [(0.0, 20.0), (30.0, 0.0)]) == pytest.approx(90.0)


def test_training_alone_bounds_a_step_with_much_capacity() -> None:
    assert oracle_step_s(DEMAND, [(0.0, 1e6)]) == pytest.approx(50.0)


def test_the_longest_response_bounds_it() -> None:
    assert oracle_step_s(replace(DEMAND, longest_s=300.0), [(0.0, 20.0)]) == pytest.approx(310.0)


def test_the_pull_bounds_it_where_spot_works() -> None:
    slow = replace(DEMAND, pull_s=500.0)
    assert oracle_step_s(slow, [(0.0, 20.0)]) == pytest.approx(500.0)
    assert oracle_step_s(slow, []) == pytest.approx(150.0)


def test_a_bound_falls_with_more_capacity_and_matches_a_fine_integration() -> None:
    curve = [(0.0, 5.0), (20.0, 0.0), (35.0, 25.0), (60.0, 8.0)]
    exact = oracle_step_s(DEMAND, curve)
    seconds, done = 0.0, 0.0
    while done < DEMAND.work:
        rate = next(value for at, value in reversed(curve) if at <= seconds)
        done += 0.001 * (rate + (DEMAND.reserved_rate if seconds >= 50 else 0.0))
        seconds += 0.001
    assert exact == pytest.approx(seconds, abs=0.01)
    assert oracle_step_s(DEMAND, [(at, 2 * value) for at, value in curve]) < exact


def test_integral_of_a_step_curve() -> None:
    assert integral([(0.0, 2.0), (10.0, 5.0)], 12.0) == pytest.approx(30.0)
    assert integral([(0.0, 2.0), (10.0, 5.0)], 4.0) == pytest.approx(8.0)
