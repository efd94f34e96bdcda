"""The fleet that a run chooses for itself, against brute force over fleets of every size, simulated."""

from __future__ import annotations

import pytest

from benchmarks.scheduler import fleet_size
from benchmarks.scheduler.fleet_size import Setting

pytestmark = pytest.mark.property

DEARER = 0.035
"""With whole groups, as live runs train; 0.03 held with single responses."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_size, "MOST", 4)


@pytest.mark.parametrize(("spot", "egress"), [(5.32, 0.0), (21.0, 0.0), (5.32, 0.05)])
def test_a_token_costs_hardly_more_than_with_the_best_fleet(spot: float, egress: float) -> None:
    found = fleet_size.run(Setting("paper-14b", 5_120, spot, egress))
    assert found["dearer"] <= DEARER, found


def test_the_settings_ask_for_different_fleets() -> None:
    cheap, dear = (Setting("paper-14b", 5_120, spot, 0.0) for spot in (5.32, 21.0))
    assert fleet_size.chosen(cheap) > fleet_size.chosen(dear) >= 1
