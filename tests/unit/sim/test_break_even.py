"""The discount at which spot machines begin to pay, by arithmetic that can be done on paper."""

from __future__ import annotations

import pytest

from benchmarks.paper import break_even

PRESET = "paper-14b"
"""One node of eight GPUs, machines of two: four of these cost as much as the node without a discount."""


@pytest.mark.parametrize(
    ("machines", "speedup", "discount"), [(4, 2.0, 0.0), (4, 1.5, 0.5), (8, 2.0, 0.5), (4, 3.0, -1.0)]
)
def test_a_fleet_breaks_even_where_it_is_as_much_dearer_as_faster(
    machines: int, speedup: float, discount: float
) -> None:
    assert break_even.discount(PRESET, machines, speedup) == pytest.approx(discount)


def test_windows_count_with_their_mean_speed_up_and_machines() -> None:
    runs = {
        f"{PRESET}/on_demand/0/0": {"tokens_per_s": 100.0},
        f"{PRESET}/paper/0/0": {"tokens_per_s": 140.0, "mean_spot_machines": 3.0},
        f"{PRESET}/paper/1/0": {"tokens_per_s": 160.0, "mean_spot_machines": 5.0},
        f"{PRESET}/rlboost/1/0": {"tokens_per_s": 900.0, "mean_spot_machines": 9.0},
    }
    found = {check.what: check.simulated for check in break_even.checks({}, runs)}
    assert found["break-even discount, 14b, all windows, 4.0 machines"] == pytest.approx(0.5)
    assert not any("six machines" in what and "own" not in what for what in found), "nothing that was not run"
